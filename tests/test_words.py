"""The words of the package: what a machine can see of them. Counts may only fall."""

from __future__ import annotations

import ast
import io
import re
import tokenize

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
    "_culprit": "_unpicklable_part",
    "_ending_of": "_exit_report",
    "_folded_here": "_reduce_gathered",
    "_folded_there": "_reduce_large",
    "_forget_parent": "_remove_parent_variables",
    "_give_way": "_restore_in_child",
    "_Held": "_TrackedObject",
    "_lent": "_temporary_states",
    "_once_a_row": "_keep_one_rank_per_group",
    "_our_launch": "_launched_by_fabric",
    "_Pass": "_Iteration",
    "_permuted": "_random_permutation",
    "_refuse_running": "_check_no_running_iterator",
    "_Rows": "_CSVRows",
    "_tell": "_report_unequal_lengths",
    "_welcome": "_answer_tokens",
    "_Writing": "_ExperimentLogger",
    "absent": "missing_ranks_text",
    "check_alike": "check_same_data",
    "check_padding": "reject_padding",
    "Creator": "ParentRank",
    "first_place": "first_rank_env",
    "forked": "after_fork",
    "Found": "DetectedEnvironment",
    "fresh_part": "attempt_store",
    "keep_listening": "register_listener",
    "marked": "recording_phases",
    "NotedExit": "ReportedExit",
    "nothing_collected": "gc_disabled",
    "part_of_store": "prefix_store",
    "place_here": "first_rank_env_of",
    "port_of": "derive_port",
    "repaired": "pool_nrmse",
    "rest_openmp": "pause_openmp",
    "shares_itself": "dataset_shards_itself",
    "shows": "should_show",
    "start_others": "start_other_ranks",
    "take_port": "reserve_port",
    "Tie": "SupervisorLink",
    "tie_to_parent": "attach_to_supervisor",
    "Told": "RankStates",
    "watch_beside": "supervise_other_ranks",
    "whole_number": "int_variable",
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
    "Answer": "RankResult",
    "Arrived": "ReceivedObject",
    "Broken": "PromiseBroken",
    "Done": "CompletedWork",
    "Dumped": "PickledObject",
    "Engines": "DeepSpeedLayout",
    "Job": "RankCall",
    "Joined": "JoinedBatchSampler",
    "Label": "TensorMetadata",
    "ReducedByHorovod": "HorovodLayout",
    "Sharing": "LoaderOptions",
    "Together": "CheckedCall",
    "Undecided": "AutoStrategy",
    "_Parcel": "_FlatBucket",
    "across": "apply_verb",
    "check_given": "check_not_set_up",
    "check_started": "check_started_processes",
    "count_elsewhere": "count_remote_devices",
    "death": "exit_result",
    "decided": "choose_strategy",
    "fitting": "key_mapping",
    "gather_again": "unshard_again",
    "gather_dumped": "gather_pickled",
    "goes_on": "is_underway",
    "is_users": "is_user_code",
    "keep_arguments": "preserve_arguments",
    "keep_promise": "run_promise",
    "line_name": "format_line",
    "mean_of_bucket": "average_bucket",
    "name_strategy": "requested_strategy",
    "needed": "import_package",
    "only": "at_most_one",
    "others_may_end": "translated_errors",
    "refuse_before": "require_torch",
    "require": "require_packages",
    "say": "print_line",
    "silence": "timeout_failure",
    "take_inherited": "pop_inherited_secret",
    "take_over": "disable_backward_hooks",
    "told_by": "broadcast_object",
    "trains": "has_optimizer",
    "user_place": "user_line",
    "warn_of_raw": "warn_if_not_set_up",
    "watch_loaders": "record_raw_iterations",
    "with_ties": "add_tied_keys",
    "label_of": "metadata_of",
    "DividedCall": "ShardedCall",
    "Failed": "StageFailure",
    "Flow": "PipelinedModule",
    "Form": "TreeMeta",
    "JointStep": "CollectiveStep",
    "Kept": "SavedForward",
    "Leaf": "TensorMeta",
    "Pass": "PassState",
    "Room": "MessageBuffer",
    "Row": "SequenceGroup",
    "SequencePart": "SequenceShard",
    "Tied": "TiedParameter",
    "_Called": "_GradMode",
    "_Entrance": "_InputCheckHook",
    "_Here": "_Current",
    "_Known": "_ReplicaState",
    "_Passing": "_Exchange",
    "_each_parcel": "_exchange_in_buckets",
    "_lend": "_free_until_backward",
    "alternating": "one_forward_one_backward",
    "backwards": "all_backwards",
    "called": "recording_grad_mode",
    "check_rows": "check_divisible",
    "checked_balance": "validate_balance",
    "converted": "converted_after_setup",
    "current_part": "current_shard",
    "emptied": "empty_",
    "expect_thawed": "set_frozen_group_dtypes",
    "first_then_others": "rank_zero_first_context",
    "form_of": "tree_meta",
    "forwards": "all_forwards",
    "free_root": "reshard_root",
    "gather_root": "unshard_root",
    "hook_again": "restore_comm_hooks",
    "is_gathered_ahead": "is_prefetched",
    "is_split": "is_dtensor",
    "joins_parameters": "couples_parameters",
    "kept_buffers": "preserve_buffers",
    "make_rows": "make_data_parallel_mesh",
    "mend_dtensors": "patch_dtensor",
    "own": "as_non_leaves",
    "own_meta": "meta_slots",
    "own_part": "local_shard",
    "own_parts": "local_shards",
    "part_like": "shard_like",
    "place_optimizer_state": "shard_optimizer_state",
    "reducing": "replicas_reducing",
    "seeing": "viewing",
    "show_part": "restore_sharded",
    "split_error": "translate_dtensor_error",
    "spread_gradients": "local_gradients_by_group",
    "stay_gathered": "keep_unsharded",
    "thawed_late": "unfrozen_after_setup",
    "try_parts": "try_shards",
    "try_rows": "try_row_independence",
    "untouched": "preserve_state",
    "unused_parameters": "missing_gradients_error",
    "warn_of_modules": "warn_batch_dependent",
    "whole_of": "unsharded_of",
    "_accumulates": "_writes_gradients",
    "_card_address": "_interface_address",
    "_close_all": "_close_after_fork",
    "_exactly": "_receive_exactly",
    "_forked": "_refuse_calls_after_fork",
    "_has_left": "_has_exited",
    "_how_far": "_progress",
    "_method_of_inner": "_inner_method",
    "_name_of": "_stable_name",
    "_of_module": "_on_module",
    "_onto_inner": "_inner_attribute",
    "_plain": "_without_numbers",
    "_reaching": "_connection_errors",
    "_trimmed": "_cut_to_difference",
    "_verb_frame": "_collective_frame",
    "_waiting_in": "_blocking_call",
    "aligned": "align_columns",
    "anchor": "hook_target",
    "as_table": "status_table",
    "DeviceWatch": "StalledDevice",
    "from_text": "decode_report",
    "grouped": "encode_groups",
    "HookedCall": "NotifyingForward",
    "in_this_thread": "with_thread",
    "Meeting": "GatheredFrames",
    "message": "make_frame",
    "StillWatch": "BlockedThread",
    "stuck": "find_deadlocked",
    "to_text": "encode_report",
    "ungrouped": "decode_groups",
    "waits_of_world": "job_detector",
    "watch_over": "watchdog_of_job",
    "kept_elsewhere": "placeholder_of",
    "elsewhere": "to_placeholder",
    "is_elsewhere": "is_placeholder",
    "put_in_place": "commit_path",
    "part_of": "temporary_path",
    "alone_in": "directory_lock",
    "is_held": "is_locked",
    "_let_go": "_unlock",
    "_open_up": "_apply_modes",
    "_beside": "_leftovers",
    "untrusted": "unsafe_object_error",
    "refused_global": "unsafe_global_error",
    "unreadable": "unreadable_error",
    "_nature": "_describe_head",
    "_around": "_archive_ends",
    "_is_open": "_is_flattened",
    "_on_disk": "_file_backed",
    "_told": "_read_reports",
    "_mark": "_marker_of",
    "_as_here": "_to_local_names",
    "_some": "_first_three",
    "_asked": "_stop_checked",
    "_quiet": "_discard_output",
    "check_opened": "check_directory",
    "divided": "sharding_sequence",
    "hold": "keep_locked",
    "knows_its_rank": "shards_by_rank",
    "Opened": "CheckedDirectory",
    "retire": "remove_old",
    "Seat": "RankAssignment",
    "ungathered": "without_unshard",
}
OPENERS = re.compile(r"(That|What|Who|Whom|Whose|Of|As|Those|See|How|Where|When)\b")
LONGEST_SENTENCE = 30  # words
# How many there are. Lower a number when you have mended some; it must not rise.
MOST_OPENERS, MOST_LONG_IN_DOCSTRINGS, MOST_LONG_IN_PAGES = 0, 1, 5


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


# Verbs of speech and motion, which code does not do: no comment and no docstring of the package has them.
SPOKEN = re.compile(
    r"\b(speaks?|spoke|knows?|knew|meets?|met|goes|went|gone|comes?|came|hears?|heard|tells?|told|says?|said|"
    r"whoever|whom|rides?|gives? up|stands?|stood|forgets?|remembers?|notices?|asks?|asked)\b"
)


def test_code_neither_speaks_nor_walks():
    comments = [
        (f"{path.relative_to(ROOT)}:{token.start[0]}", token.string)
        for path in sorted(PACKAGE.rglob("*.py"))
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.COMMENT
    ]
    strings = [
        (f"{name}:{node.lineno}", node.value.value)
        for name, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    ]
    texts = [(place, re.sub(r"`[^`]*`", "x", text)) for place, text in [*strings, *comments]]
    found = [f"{place}: {word[0]}" for place, text in texts for word in SPOKEN.finditer(text)]
    assert found == []


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
