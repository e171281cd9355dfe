"""Every metric class of torchmetrics' five tensor and text domains: how to construct it, and data for it.

A class that is in none of the tables here has no case, and `test_metrics.py` fails.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.aggregation import Running, SumMetric

DOMAINS = ("classification", "regression", "aggregation", "retrieval", "text")
CLASSES, LABELS = 3, 4
SKIPPED = {
    "BERTScore": "needs transformers, and downloads a model",
    "InfoLM": "needs transformers, and downloads a model",
    "BaseAggregator": "abstract: its subclasses are tested",
    "Metric": "abstract",
    "RetrievalMetric": "abstract: its subclasses are tested",
}

ARGUMENTS: dict[str, dict[str, Any]] = {
    "PrecisionAtFixedRecall": {"min_recall": 0.5},
    "RecallAtFixedPrecision": {"min_precision": 0.5},
    "SensitivityAtSpecificity": {"min_specificity": 0.5},
    "SpecificityAtSensitivity": {"min_sensitivity": 0.5},
    "FBetaScore": {"beta": 2.0},
    "BinaryFairness": {"num_groups": 2},
    "BinaryGroupStatRates": {"num_groups": 2},
    "CriticalSuccessIndex": {"threshold": 0.5},
    "MinkowskiDistance": {"p": 3},
    "Perplexity": {},
    "ROUGEScore": {"rouge_keys": ("rouge1", "rougeL")},
    "RetrievalRecallAtFixedPrecision": {"min_precision": 0.3},
    "Running": {"window": 20},
    "RunningMean": {"window": 20},
    "RunningSum": {"window": 20},
}
"""By the end of the class's name, without its task."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "BinaryAUROC": [{"thresholds": 5}],
    "MulticlassAccuracy": [{"average": "micro"}, {"average": None}, {"top_k": 2}],
    "MultilabelAccuracy": [{"average": "none"}],
    "MulticlassROC": [{"thresholds": 7}],
    "MultilabelPrecisionRecallCurve": [{"thresholds": 7}],
    "MulticlassConfusionMatrix": [{"normalize": "true"}],
    "MulticlassExactMatch": [{"multidim_average": "samplewise"}],
    "MultilabelExactMatch": [{"multidim_average": "samplewise"}],
    "MulticlassStatScores": [{"multidim_average": "samplewise", "average": "macro"}],
    "PearsonCorrCoef": [{"num_outputs": 2}],
    "SpearmanCorrCoef": [{"num_outputs": 2}],
    "ConcordanceCorrCoef": [{"num_outputs": 2}],
    "KendallRankCorrCoef": [{"num_outputs": 2}],
    "NormalizedRootMeanSquaredError": [
        {"normalization": "range"},
        {"normalization": "std"},
        {"normalization": "l2"},
        {"normalization": "range", "num_outputs": 2},
    ],
    "MeanSquaredError": [{"num_outputs": 2}, {"squared": False}],
    "ExplainedVariance": [{"multioutput": "raw_values"}],
    "KLDivergence": [{"reduction": "none"}],
    "EditDistance": [{"reduction": "none"}, {"reduction": "sum"}],
    "RetrievalMAP": [{"aggregation": "median"}, {"empty_target_action": "skip"}],
    "BLEUScore": [{"smooth": True}],
    "CHRFScore": [{"return_sentence_level_score": True}],
    "TranslationEditRate": [{"return_sentence_level_score": True}],
    "ExtendedEditDistance": [{"return_sentence_level_score": True}],
}
"""Further arguments, each beside the ones above."""

WORDS = (
    "the", "a", "cat", "dog", "sat", "on", "mat", "ran", "over", "red", "lazy", "fox", "sees", "its", "own",
    "long", "tail",
)  # fmt: skip


def all_classes(domain: str) -> dict[str, type]:
    """Every metric class of a domain, exported or not (those that need an extra may not be)."""
    root = importlib.import_module(f"torchmetrics.{domain}")
    modules = [root]
    for found in pkgutil.iter_modules(getattr(root, "__path__", [])):
        modules.append(importlib.import_module(f"{root.__name__}.{found.name}"))
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Metric) and not name.startswith("_")
    }


def cases_of(domain: str) -> dict[str, tuple[type, dict[str, Any]]]:
    """Title to class and arguments, for every class of a domain that is not skipped."""
    cases = {}
    for name, kind in sorted(all_classes(domain).items()):
        if name in SKIPPED:
            continue
        for number, extra in enumerate([{}, *VARIANTS.get(name, [])]):
            arguments = {**(_task(name) if domain == "classification" else {}), **_own(name), **extra}
            cases[f"{name} {number}" if number else name] = (kind, arguments)
    return cases


def make(kind: type, arguments: dict[str, Any]) -> Any:
    """A metric that leaves the ranks to us."""
    if kind is Running:
        return Running(SumMetric(sync_on_compute=False), **arguments)
    return kind(**arguments, sync_on_compute=False)


def batch(domain: str, metric: Any, size: int, generator: torch.Generator) -> tuple[tuple[Any, ...], dict]:
    """Arguments of `update`, random."""
    return _BATCHES[domain](type(metric).__name__, metric, size, generator)


def _own(name: str) -> dict[str, Any]:
    plain = name
    for task in ("Binary", "Multiclass", "Multilabel"):
        plain = plain.removeprefix(task) if name not in ARGUMENTS else plain
    return ARGUMENTS.get(plain, {})


def _task(name: str) -> dict[str, Any]:
    if name.startswith("Multiclass"):
        return {"num_classes": CLASSES}
    if name.startswith("Multilabel"):
        return {"num_labels": LABELS}
    if name.startswith("Binary"):
        return {}
    return {"task": "multiclass", "num_classes": CLASSES}


def _classification(name: str, metric: Any, size: int, g: torch.Generator) -> Any:
    if name.startswith("Binary"):
        data = (torch.rand(size, generator=g), torch.randint(2, (size,), generator=g))
        if name in ("BinaryFairness", "BinaryGroupStatRates"):
            data = (*data, torch.randint(2, (size,), generator=g))
        return data, {}
    if name.startswith("Multilabel"):
        shape = (size, LABELS)
        if getattr(metric, "multidim_average", "") == "samplewise":
            shape = (size, LABELS, 5)
        return (torch.rand(shape, generator=g), torch.randint(2, shape, generator=g)), {}
    deep = name.endswith("ExactMatch") or getattr(metric, "multidim_average", "") == "samplewise"
    more = (5,) if deep else ()
    preds = torch.rand(size, CLASSES, *more, generator=g).softmax(1)
    return (preds, torch.randint(CLASSES, (size, *more), generator=g)), {}


def _regression(name: str, metric: Any, size: int, g: torch.Generator) -> Any:
    outputs = getattr(metric, "num_outputs", 1)
    shape = (size, outputs) if isinstance(outputs, int) and outputs > 1 else (size,)
    if getattr(metric, "multioutput", "") == "raw_values":
        shape = (size, 2)
    if name in ("CosineSimilarity", "KLDivergence", "JensenShannonDivergence"):
        shape = (size, 3)
    preds, target = torch.rand(shape, generator=g) + 0.1, torch.rand(shape, generator=g) + 0.1
    if name in ("KLDivergence", "JensenShannonDivergence"):
        preds, target = preds / preds.sum(1, keepdim=True), target / target.sum(1, keepdim=True)
    if name == "ContinuousRankedProbabilityScore":
        preds = torch.rand(size, 4, generator=g)
    return (preds, target), {}


def _aggregation(name: str, metric: Any, size: int, g: torch.Generator) -> Any:
    return (torch.rand(size, generator=g),), {}


def _retrieval(name: str, metric: Any, size: int, g: torch.Generator) -> Any:
    indexes = torch.randint(4, (size,), generator=g)
    return (torch.rand(size, generator=g), torch.randint(2, (size,), generator=g), indexes), {}


def _text(name: str, metric: Any, size: int, g: torch.Generator) -> Any:
    if name == "Perplexity":
        return (torch.rand(size, 4, 6, generator=g), torch.randint(6, (size, 4), generator=g)), {}
    size = size // 5 + 1  # some take their time
    preds, target = [[_sentence(g) for _ in range(size)] for _ in range(2)]
    if name == "SQuAD":
        ids = [str(int(torch.randint(10**9, (), generator=g))) for _ in range(size)]
        asked = [{"prediction_text": text, "id": i} for text, i in zip(preds, ids, strict=True)]
        answers = [
            {"answers": {"answer_start": [0], "text": [text]}, "id": i}
            for text, i in zip(target, ids, strict=True)
        ]
        return (asked, answers), {}
    if name in ("BLEUScore", "SacreBLEUScore", "CHRFScore", "TranslationEditRate", "ExtendedEditDistance"):
        return (preds, [[text, _sentence(g)] for text in target]), {}
    return (preds, target), {}


def _sentence(g: torch.Generator) -> str:
    # The first words alike, so that n-gram scores are not all zero.
    length = int(torch.randint(2, 6, (), generator=g))
    places: Tensor = torch.randint(len(WORDS), (length,), generator=g)
    return " ".join(["the cat sat on the", *[WORDS[place] for place in places.tolist()]])


_BATCHES = {
    "classification": _classification,
    "regression": _regression,
    "aggregation": _aggregation,
    "retrieval": _retrieval,
    "text": _text,
}
