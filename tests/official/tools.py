"""Which tools there are, how each is installed, and what it must say."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from compose.stack import models

HERE = Path(__file__).parent
CUT = r"LengthFinishReasonError|EOF while parsing|Invalid JSON: |Unterminated string"
"""What the SDKs say of an answer that the limit cut: of a small model at its default temperature every third one is."""

NO_CALL = r"list index out of range|AssertionError"
"""What examples say of a model that is free to call a tool and does not."""


class Missing(Exception):
    """The tool cannot be installed here."""


class Place(msgspec.Struct, frozen=True):
    """Where a tool is, and what it asks."""

    folder: Path
    data_dir: Path
    url: str
    key: str
    model: str

    @property
    def python(self) -> str:
        return str(self.folder / "venv" / "bin" / "python")


class Step(msgspec.Struct, frozen=True):
    """One run."""

    label: str
    command: list[str]
    says: str = ""
    """Must be found in what it prints."""
    or_else: str = ""
    """Also right when this is, whatever the exit status."""
    refused: str = ""
    """We refuse what it asks, and say this."""
    folder: Path | None = None


class Tool(msgspec.Struct, frozen=True):
    """One client."""

    what: str
    prepare: Callable[[Place], list[Step]]
    """Installs it; raises Missing."""
    simulated: bool = False
    environment: dict[str, str] = {}


def _call(*command: str, folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Missing((done.stderr.strip().splitlines() or ["it failed"])[-1][:200])


def environment(place: Place, *requirements: str, beside: bool = False) -> None:
    """An environment with them, made once; ``beside``: over ours, which has PyTorch and transformers already."""
    place.folder.mkdir(parents=True, exist_ok=True)
    stamp = place.folder / "installed"
    if stamp.exists() and stamp.read_text() == " ".join(requirements):
        return
    _call(sys.executable, "-m", "venv", "--clear", "venv", folder=place.folder)
    if beside:
        theirs = next((place.folder / "venv" / "lib").glob("python*")) / "site-packages" / "ours.pth"
        theirs.write_text(sysconfig.get_path("purelib"))
    _call(place.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *requirements, folder=place.folder)
    stamp.write_text(" ".join(requirements))


# The SDKs' own examples -----------------------------------------------------------------------------------------

OPENAI, ANTHROPIC = "3.57.0", "2.14.0"
OPENAI_EXAMPLES = {
    "demo.py": "",
    "async_demo.py": "",
    "httpx2_client.py": "",
    "streaming.py": "",
    "parsing.py": CUT,
    "parsing_stream.py": CUT,
    "parsing_tools.py": f"{CUT}|{NO_CALL}",
    "parsing_tools_stream.py": CUT,
    "responses/streaming.py": CUT,
    "responses/streaming_tools.py": CUT,
    "responses/structured_outputs.py": CUT,
    "responses/structured_outputs_tools.py": f"{CUT}|{NO_CALL}",
    "responses_input_tokens.py": "",
}
OPENAI_REFUSED = {"responses/background.py": "Answers in the background are not offered"}
ANTHROPIC_EXAMPLES = {
    "messages.py": "",
    "messages_stream.py": "",
    "structured_outputs.py": CUT,
    "structured_outputs_streaming.py": CUT,
    "tools.py": "assert|max_tokens",
    "tools_stream.py": "",
    "tools_runner.py": "",
    "web_search.py": "",
}
ANTHROPIC_REFUSED = {"thinking.py": "maximum context length is", "batch_results.py msgbatch_1": "There is nothing at"}


def _examples(
    package: str, version: str, right: dict[str, str], refused: dict[str, str]
) -> Callable[[Place], list[Step]]:
    """Unchanged, from the package's source; the models that they name become aliases of ours."""

    def prepare(place: Place) -> list[Step]:
        environment(place, f"{package}=={version}", "rich", "pydantic")
        source = place.folder / f"{package}-{version}"
        if not source.exists():
            download = ["-m", "pip", "download", "-q", "--no-deps", "--no-binary", package, f"{package}=={version}"]
            _call(place.python, *download, folder=place.folder)
            with tarfile.open(place.folder / f"{package}-{version}.tar.gz") as archive:
                archive.extractall(place.folder, filter="data")
        folder = source / "examples"
        names = [*right, *refused]
        models = {
            name
            for example in names
            for name in re.findall(r'model="([^"]+)"', (folder / example.split()[0]).read_text())
        }
        for name in sorted(models):
            alias = ["alias", "set", name, "--model", place.model, "--data-dir", str(place.data_dir.absolute())]
            _call(sys.executable, "-m", "compose.cli.main", *alias, folder=HERE.parents[1])
        return [
            Step(
                label=name.split()[0].replace("/", "-"),
                command=[place.python, *name.split()],
                or_else=right.get(name, ""),
                refused=refused.get(name, ""),
                folder=folder,
            )
            for name in names
        ]

    return prepare


# Agents -----------------------------------------------------------------------------------------------------------


def _openai_agents(place: Place) -> list[Step]:
    environment(place, "openai-agents==0.24.0")
    steps = [
        (api, mode, choice)
        for api in ("chat", "responses")
        for mode in ("whole", "stream")
        for choice in ("required", "auto")
    ]
    return [
        Step(
            label="-".join(step),
            command=[place.python, str(HERE / "openai_agent.py"), place.model, *step],
            says="answered",
        )
        for step in steps
    ]


def _claude_agents(place: Place) -> list[Step]:
    environment(place, f"anthropic=={ANTHROPIC}")
    return [
        Step(label=mode, command=[place.python, str(HERE / "claude_agent.py"), place.model, mode], says="answered")
        for mode in ("whole", "stream", "cut")
    ]


def _ai_sdk(place: Place) -> list[Step]:
    if not shutil.which("npm"):
        raise Missing("Node.js is not installed")
    place.folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "ai_sdk.mjs", place.folder)
    packages = ["ai@7", "@ai-sdk/openai", "@ai-sdk/anthropic", "@ai-sdk/openai-compatible", "zod@4"]
    if not (place.folder / "node_modules").exists():
        _call(
            "npm", "install", "--silent", "--no-fund", "--no-audit", "--ignore-scripts", *packages, folder=place.folder
        )
    providers = ("openai.responses", "openai.chat", "anthropic", "compatible")
    return [
        Step(
            label=provider, command=["node", "ai_sdk.mjs", provider, place.url, place.key, place.model], says="answered"
        )
        for provider in providers
    ]


# Load generators and evaluation -----------------------------------------------------------------------------------


def _lm_eval(place: Place) -> list[Step]:
    environment(place, "lm-eval[api]==0.4.13", beside=True)
    command = [place.python, str(HERE / "lm_eval_scores.py"), place.url, place.model, tokenizer_folder(place.model)]
    return [Step(label="scores", command=command, says="Paris before banana")]


VLLM_BENCH_SERVE = (
    "import sys; from vllm.benchmarks import serve; from vllm.utils.argparse_utils import FlexibleArgumentParser; "
    "parser = FlexibleArgumentParser(); serve.add_cli_args(parser); serve.main(parser.parse_args(sys.argv[1:]))"
)
"""The command `vllm bench serve`, without the engine that `vllm` would import first."""
GUIDELLM = "guidellm==0.8.1"


def _vllm_bench(place: Place) -> list[Step]:
    place.folder.mkdir(parents=True, exist_ok=True)
    flags = {
        "backend": "openai-chat",
        "base-url": place.url,
        "endpoint": "/v1/chat/completions",
        "model": place.model,
        "tokenizer": tokenizer_folder(place.model),
        "dataset-name": "random",
        "random-input-len": "32",
        "random-output-len": "16",
        "num-prompts": "20",
        "request-rate": "5",
    }
    line = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "-c", VLLM_BENCH_SERVE, *line]
    return [Step(label="serve", command=command, says=r"Successful requests:\s+20\b")]


def _guidellm(place: Place) -> list[Step]:
    environment(place, GUIDELLM, beside=True)
    flags = {
        "backend": f"kind=openai_http,target={place.url},model={place.model},api_key={place.key}",
        "profile": "kind=constant,rate=2",
        "constraint": "kind=max_requests,count=10",
        "tokenizer": f"kind=huggingface_auto,model={tokenizer_folder(place.model)}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "output": "kind=json,path=report.json",
    }
    line = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [str(Path(place.python).with_name("guidellm")), "run", *line, "--disable-progress"]
    return [Step(label="run", command=command, says="Benchmarking complete, generated 1 benchmark")]


def tokenizer_folder(model: str) -> str:
    """Folder of the model's tokenizer; of a simulated one that of the small real model."""
    known = model if Path(model).is_dir() else models.DEFAULT_MODEL
    return str(models.prepare(known, progress=lambda text: None).path)


TOOLS: dict[str, Tool] = {
    "openai": Tool(
        what=f"`openai` {OPENAI}: its own examples",
        prepare=_examples("openai", OPENAI, OPENAI_EXAMPLES, OPENAI_REFUSED),
    ),
    "anthropic": Tool(
        what=f"`anthropic` {ANTHROPIC}: its own examples",
        prepare=_examples("anthropic", ANTHROPIC, ANTHROPIC_EXAMPLES, ANTHROPIC_REFUSED),
    ),
    "openai-agents": Tool(
        what="`openai-agents` 0.24: an agent with a tool, chat and responses", prepare=_openai_agents
    ),
    "claude-agents": Tool(what="`anthropic`: the tool runner over several turns", prepare=_claude_agents),
    "ai-sdk": Tool(what="AI SDK 7: text, stream, tool, object", prepare=_ai_sdk),
    "lm-eval": Tool(
        what="`lm-eval` 0.4.13, `local-completions`", prepare=_lm_eval, environment={"HF_HUB_OFFLINE": "1"}
    ),
    "vllm-bench": Tool(
        what="`vllm bench serve`, `openai-chat`: 20 requests",
        prepare=_vllm_bench,
        simulated=True,
        environment={"HF_HUB_OFFLINE": "1"},
    ),
    "guidellm": Tool(
        what="`guidellm` 0.8.1: 10 requests", prepare=_guidellm, simulated=True, environment={"HF_HUB_OFFLINE": "1"}
    ),
}
