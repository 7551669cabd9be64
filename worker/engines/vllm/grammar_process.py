"""The process in which constraints are compiled before any engine sees them: each in a child with bounds of its own.

Compiling a few hundred characters may take minutes and all memory, in code that nothing but the end of its process
stops. This process holds xgrammar and the tokenizer; for each constraint it forks a child, which the kernel ends when
it has used its CPU time or memory. What a child could compile, an engine can.

Line by line, JSON: the tokenizer first (xgrammar's own form), then Jobs on standard input, and their Verdicts on
standard output, in any order. It ends with its input.
"""

import json
import os
import resource
import selectors
import sys
import time
from typing import Any, Literal

import msgspec

CPU_S = 5
"""CPU time for one constraint. With a vocabulary of 49,000 a schema of a hundred properties takes .03 s, a string of up
to 1,000 characters .4 s (measured); four times that with the largest ones."""
CONVERT_S = 0.5
"""Of it, for the part that vLLM repeats in its caller's event loop."""
MEMORY_BYTES = 1 << 30
"""What a child may allocate beside what this process has."""

Kind = Literal["json", "regex", "ebnf", "lark", "structural_tag"]
Outcome = Literal["compiled", "invalid", "too_complex"]

_INVALID, _TOO_COMPLEX = 3, 4


class Job(msgspec.Struct, frozen=True):
    """One constraint to try. ``number`` comes back in its verdict."""

    number: int
    kind: Kind
    text: str
    any_whitespace: bool


class Verdict(msgspec.Struct, frozen=True):
    """What became of it."""

    number: int
    outcome: Outcome


def main() -> None:
    """Serve until standard input ends."""
    import xgrammar

    compiler: Any = None
    rest, waits = b"", selectors.DefaultSelector()
    waits.register(sys.stdin.fileno(), selectors.EVENT_READ)
    while True:
        for key, _ in waits.select():
            if key.data is not None:
                number, pid = key.data
                waits.unregister(key.fd)
                os.close(key.fd)
                os.write(sys.stdout.fileno(), msgspec.json.encode(Verdict(number, _outcome(pid))) + b"\n")
                continue
            if not (piece := os.read(key.fd, 1 << 20)):
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if compiler is None:
                    tokenizer = xgrammar.TokenizerInfo.deserialize_json(json.loads(line))
                    compiler = xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)
                else:
                    job = msgspec.json.decode(line, type=Job)
                    end, pid = _try(compiler, job)
                    waits.register(end, selectors.EVENT_READ, (job.number, pid))


def _try(compiler: Any, job: Job) -> tuple[int, int]:
    """A child that tries it: the end of a pipe which it closes by dying, and its id."""
    ours, theirs = os.pipe()
    if pid := os.fork():
        os.close(theirs)
        return ours, pid
    status = _INVALID
    try:
        os.close(0)
        os.nice(5)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_S, used + CPU_S + 1))
        most = _virtual_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        status = _compile(compiler, job)
    except MemoryError:
        status = _TOO_COMPLEX
    except BaseException:
        status = _INVALID
    finally:
        os._exit(status)


def _compile(compiler: Any, job: Job) -> int:
    """As vLLM 0.32 does (``vllm.v1.structured_output.backend_xgrammar``): first to find faults, then for the engine."""
    from xgrammar import Grammar

    started, text = time.process_time(), job.text
    match job.kind:
        case "json":
            Grammar.from_json_schema(text)
        case "regex":
            Grammar.from_regex(text)
        case "ebnf":
            Grammar.from_ebnf(text)
        case "lark":
            Grammar.from_lark(text)
        case "structural_tag":
            Grammar.from_structural_tag(*_tag(text))
    if time.process_time() - started > CONVERT_S:
        return _TOO_COMPLEX
    match job.kind:
        case "json":
            separators = None if job.any_whitespace else (",", ":")
            made = compiler.compile_json_schema(text, any_whitespace=job.any_whitespace, separators=separators)
        case "regex":
            made = compiler.compile_regex(text)
        case "ebnf":
            made = compiler.compile_grammar(text)
        case "lark":
            made = compiler.compile_lark(text)
        case "structural_tag":
            made = compiler.compile_structural_tag(*_tag(text))
    return 0 if _begins(made) else _INVALID


def _begins(made: Any) -> bool:
    """Whether any token may come first: after ``root ::= root`` or ``{"$ref": "#"}`` none may, and the engine fails."""
    import numpy
    from xgrammar import GrammarMatcher

    allowed = numpy.zeros((1, (made.tokenizer_info.vocab_size + 31) // 32), dtype=numpy.int32)
    GrammarMatcher(made).fill_next_token_bitmask(allowed)
    return bool(allowed.any())


def _tag(text: str) -> tuple[Any, ...]:
    """A structural tag in its present form, or in the former one of structures and triggers."""
    from xgrammar import StructuralTagItem

    tag = json.loads(text)
    if "structures" not in tag:
        return (text,)
    items = [
        StructuralTagItem(begin=it["begin"], schema=json.dumps(it["schema"]), end=it["end"]) for it in tag["structures"]
    ]
    return items, tag["triggers"]


def _outcome(pid: int) -> Outcome:
    """Of a child that ended. One that was killed, by its bounds or by a fault in compiling, went too far."""
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        return {0: "compiled", _INVALID: "invalid"}.get(os.WEXITSTATUS(status), "too_complex")  # type: ignore[return-value]
    return "too_complex"


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
