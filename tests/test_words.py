"""The words of the package: what a machine can see of them. Counts may only fall."""

from __future__ import annotations

import ast
import re

from test_architecture import PACKAGE, ROOT, sources

# Names without a meaning outside of this project, and what replaced each: no class or function has one.
RENAMED = {
    "ways": "generator_state_accessors",
    "row_size": "model_parallel_size",
    "in_step": "lockstep",
    "hang": "register_pre_backward",
    "become": "switch_kind",
    "_take_place": "_init_topology",
    "_came": "received_grad",
    "Alike": "InputConsistencyCheck",
    "Arrival": "StoreBarrier",
    "Batched": "ShardedIterableDataset",
    "CallParts": "MicrobatchArgs",
    "Dealt": "RankBatch",
    "Drawing": "SeededLoaderAdapter",
    "Elsewhere": "OnOtherRank",
    "Ending": "RankExit",
    "Guard": "CallChecker",
    "InRows": "DataParallelMesh",
    "IndexStream": "RankBatchSampler",
    "Meets": "ForwardCheck",
    "Peers": "RankGroup",
    "Place": "RankEnv",
    "RootGate": "FSDPCallGuard",
    "Rule": "ShardingRule",
    "Said": "RankReport",
    "Share": "Shard or OptimizerShard",
    "Sharded": "FSDP2Runtime",
    "Shown": "SamplerProxy",
    "Split": "DTensorLayout",
    "StandIn": "DatasetProxy",
    "Star": "ControlConnections",
    "StartedEnvironment": "ExternalEnvironment",
    "StoreSilent": "StoreTimeout",
    "Stored": "LazyTensor",
    "Turn": "ControlRound",
    "Unmade": "DeferredTensor",
    "Waits": "DeadlockDetector",
    "Whole": "Layout",
    "WholeStateOnly": "RejectPartialStateDict",
    "announce": "check_barrier",
    "attend_passes": "add_backward_listener",
    "copy_from_first": "broadcast_from_group_root",
    "held_back": "deferred_traceback",
    "follow": "remap_parameters or added",
    "is_consequence": "is_secondary_failure",
    "make_wire": "make_transport",
    "meet": "check_call, check_barrier or compare",
    "place_of": "group_rank_of or storage_key",
    "refusing": "validating",
    "ride": "exchange_small",
    "stamp": "grad_version",
    "tell_apart": "translate_ddp_error",
    "wire_of": "transport_of",
    "watch_steps": "add_step_listener",
}
OPENERS = re.compile(r"(What|Who|Whom|Whose|Of|As|Those|See|How|Where|When)\b")
LONGEST_SENTENCE = 30  # words
# How many there are. Lower a number when you have mended some; it must not rise.
MOST_OPENERS, MOST_LONG_IN_DOCSTRINGS, MOST_LONG_IN_PAGES = 0, 1, 11


def test_renamed_things_have_their_new_names():
    found = [
        f"{name}:{node.lineno}: {node.name}: write {RENAMED[node.name]}"
        for name, tree in sources().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in RENAMED
    ]
    assert found == []


def docstrings() -> list[tuple[str, str]]:
    """(place, text) of every docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (f"{name}:{getattr(node, 'lineno', 1)}", text)
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
    ]


def long_sentences(text: str) -> list[str]:
    """Return the sentences over `LONGEST_SENTENCE`, without code, tables and lists."""
    code = re.sub(r"```[\s\S]*?```|`[^`]*`", " ", text)
    prose = re.sub(r"^\|.*$|^\s*[-*#>].*$|\S+\(\S*\)", "\n\n", code, flags=re.MULTILINE)
    parts = re.split(r"(?<=[.:;?!])\s+|\n\s*\n", prose)
    return [part for part in parts if len(re.findall(r"\w+", part)) > LONGEST_SENTENCE]


def test_docstrings_open_with_what_is_returned_or_done():
    found = [f"{place}: {text.splitlines()[0]}" for place, text in docstrings() if OPENERS.match(text)]
    assert len(found) <= MOST_OPENERS, "\n".join(found)


def test_sentences_are_short():
    found = [f"{place}: {one}" for place, text in docstrings() for one in long_sentences(text)]
    assert len(found) <= MOST_LONG_IN_DOCSTRINGS, "\n".join(found)
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PACKAGE.rglob("*.md")]
    found = [f"{page}: {one}" for page in pages for one in long_sentences(page.read_text())]
    assert len(found) <= MOST_LONG_IN_PAGES, "\n".join(found)


# Words that only this project uses, or uses in another sense than the field: no page of `docs/` has them.
PRIVATE = re.compile(
    r"\b(dealt out|takes? part|goes on|go on|rides?|is told|tells|whoever|those that|of which|to the bit|"
    r"has begun|pretend|stands? still|where it was|what it has|gives? back|is no \w+ than)\b"
)


def guide() -> list[tuple[str, str]]:
    """(page, text without code) of the README and of each page of `docs/`."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    code = re.compile(r"```[\s\S]*?```|`[^`\n]*`|\]\([^)]*\)")
    return [(page.relative_to(ROOT).as_posix(), code.sub("x", page.read_text())) for page in pages]


def test_pages_for_users_have_short_sentences_and_words_of_the_field():
    found = [f"{page}: {word[0]}" for page, text in guide() for word in PRIVATE.finditer(text)]
    assert found == []
    prose = [(page, re.sub(r"^\|.*$|^#.*$", "\n", text, flags=re.MULTILINE)) for page, text in guide()]
    sentences = [(page, one) for page, text in prose for one in re.split(r"(?<=[.:;?!])\s+|\n\s*\n", text)]
    long = [f"{page}: {one}" for page, one in sentences if len(re.findall(r"\w+", one)) > LONGEST_SENTENCE]
    assert len(long) <= len(sentences) / 100, "\n".join(long)


def test_a_table_cell_of_a_page_is_one_sentence():
    cells = [
        (page, cell.strip())
        for page, text in guide()
        for row in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
        for cell in re.split(r"(?<!\\)\|", row)
    ]
    found = [f"{page}: {cell}" for page, cell in cells if re.search(r"[.!?] +[A-Z]", cell)]
    found += [f"{page}: {cell}" for page, cell in cells if len(re.findall(r"\w+", cell)) > LONGEST_SENTENCE]
    assert found == []
