"""What structured output costs: loading, compiling a grammar, and a token's mask, on one core, without a model.

Beside ours (llguidance) the same for xgrammar, where it is installed: `pip install xgrammar`.
"""

import argparse
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import print_header, spread
from tokenizers import Tokenizer
from twinpool.cluster.protocol.messages import Grammar
from twinpool.engine.fetch import fetch_model
from twinpool.engine.grammar import GrammarError, Grammars, json_source

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 5},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WIDE = {"type": "object", "properties": {f"property {i}": {"type": "integer"} for i in range(300)}}
CASES: list[tuple[str, str, Any, str]] = [
    ("any object", "json_schema", {"type": "object"}, '{"a": [1, 2, {"b": "hello there"}], "c": null}'),
    ("a person", "json_schema", PERSON, '{"name": "Ada Lovelace", "age": 36, "mail": "ada@x.org", "tags": ["a"]}'),
    ("300 properties", "json_schema", WIDE, '{"property 7": 5}'),
    ("a phone number", "regex", "[0-9]{3}-[0-9]{4}", "123-4567"),
    ("hostile repeats", "regex", "(a{1000}){1000}", ""),
    ("hostile branches", "regex", "[ab]*a[ab]{200}", "ababab"),
]
Steps = Callable[[str, Any, list[int]], tuple[float, list[float]]]  # seconds to compile, then of each token


def ours(grammars: Grammars) -> Steps:
    def run(kind: str, source: Any, tokens: list[int]) -> tuple[float, list[float]]:
        text = source if isinstance(source, str) else json_source(source)
        grammar = Grammar.model_validate({"kind": kind, "source": text})
        began_s = time.perf_counter()
        grammars.compile(grammar)
        compile_s = time.perf_counter() - began_s
        matcher, steps_s = grammars.matcher(grammar), list[float]()
        for i in range(len(tokens) + 1):
            began_s = time.perf_counter()
            matcher.allowed(tokens[:i], [0])
            steps_s.append(time.perf_counter() - began_s)
        return compile_s, steps_s

    return run


def rival(folder: Path) -> Steps:
    import xgrammar
    from transformers import AutoTokenizer

    info = xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(folder))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)

    def run(kind: str, source: Any, tokens: list[int]) -> tuple[float, list[float]]:
        began_s = time.perf_counter()
        compiled = compiler.compile_regex(source) if kind == "regex" else compiler.compile_json_schema(source)
        compile_s = time.perf_counter() - began_s
        matcher, steps_s = xgrammar.GrammarMatcher(compiled), list[float]()
        for token in [*tokens, None]:
            began_s = time.perf_counter()
            matcher.fill_next_token_bitmask(mask)
            assert token is None or matcher.accept_token(token)
            steps_s.append(time.perf_counter() - began_s)
        return compile_s, steps_s

    return run


def memory_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def measure(name: str, load: Callable[[], Steps], tokenizer: Tokenizer, num_repeats: int) -> None:
    before_mib, began_s = memory_mib(), time.perf_counter()
    run = load()
    print(f"\n{name}: loaded in {time.perf_counter() - began_s:.2f} s, {memory_mib() - before_mib:.0f} MiB")
    for title, kind, source, text in CASES:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        try:
            results = [run(kind, source, tokens) for _ in range(num_repeats)]
        except (GrammarError, RuntimeError) as error:
            print(f"  {title:17} refused: {str(error).splitlines()[0][:60]}")
            continue
        compile_ms = [1e3 * compile_s for compile_s, _ in results]
        steps_ms = [1e3 * step_s for _, steps in results for step_s in steps]
        print(
            f"  {title:17} compile {spread(compile_ms, 'ms')}   token {statistics.fmean(steps_ms):.3f} ms, "
            f"at most {max(steps_ms):.2f} ms"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    print_header("grammars: SmolLM2's vocabulary of 49,152 tokens")
    folder = fetch_model("smollm2")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    version = importlib.metadata.version
    measure(f"llguidance {version('llguidance')}", lambda: ours(Grammars.load(folder)), tokenizer, given.repeats)
    try:
        name = f"xgrammar {version('xgrammar')}"
    except importlib.metadata.PackageNotFoundError:
        print("\nxgrammar is not installed")
        return
    measure(name, lambda: rival(folder), tokenizer, given.repeats)


if __name__ == "__main__":
    main()
