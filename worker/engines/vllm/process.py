"""What runs in vLLM's engine process before vLLM: it ends with the process that started it.

vLLM's engine core does not notice that its parent was killed; it would hold its memory, and go on generating.
"""

import multiprocessing
import os
import signal
import threading
from typing import Any


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Stands for ``EngineCoreProc.run_engine_core``; vLLM's own workers end with the engine core."""
    threading.Thread(target=_follow_parent, name="follow-parent", daemon=True).start()
    from vllm.v1.engine.core import EngineCoreProc

    EngineCoreProc.run_engine_core(*args, **kwargs)


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)
