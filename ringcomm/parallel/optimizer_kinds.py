"""What an optimizer's step acts on. It is known by class, or the user says it; nothing is tried.

Ranks that have parts of weights make the steps of one process only if a step treats each element by
itself, or if one rank steps with the full weight. A trial cannot tell: classes factor matrices only
above a size, or begin with other steps.
"""

import enum
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from ringcomm.parallel.optimizer_classes import attributes_of
from ringcomm.torch_names import tree_leaves


class Kind(enum.Enum):
    """What a step acts on, as messages say it; of two that apply, the later."""

    ELEMENTS = "updates each element by itself"
    WEIGHTS = "needs full weights"
    TOGETHER = "updates several weights together"
    RANDOM = "draws random numbers in its step, other ones on each rank"
    OTHER = "needs or keeps more than weights, dense gradients and a state of each weight"


# By package, the names of its classes.
_ELEMENTS = {
    "torch": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    "bitsandbytes": "Adagrad Adagrad32bit Adam Adam32bit AdamW AdamW32bit Lion Lion32bit PagedAdam"
    " PagedAdam32bit PagedAdamW PagedAdamW32bit PagedLion PagedLion32bit RMSprop RMSprop32bit SGD"
    " SGD32bit",
    "optimi": "Adam AdamW Adan Lion RAdam Ranger SGD",
    "pytorch_optimizer": "ADOPT AccSGD AdEMAMix AdaBelief AdaDelta AdaMax AdaMod AdaPNM AdaSmooth"
    " AdamC AdamG AdamWSN Adan Ano BCOS DiffGrad DualAdam EXAdam FOCUS FTRL Grams GrokFastAdamW"
    " Kate LaProp Lion MSVAG PAdam PID PNM QHM RAdam SGDW SRMM ScheduleFreeAdamW ScheduleFreeRAdam"
    " ScheduleFreeSGD SignSGD SimplifiedAdEMAMix Tiger VSGD Yogi",
    "schedulefree": "AdamWScheduleFree AdamWScheduleFreePaper AdamWScheduleFreeReference"
    " RAdamScheduleFree SGDScheduleFree SGDScheduleFreeReference",
    "timm": "AdaBelief AdamWLegacy Adan Adopt LaProp Lion MADGRAD NAdamLegacy NAdamW RAdamLegacy"
    " RMSpropTF SGDW",
}
_WEIGHTS = {
    "torch": "Adafactor Muon",
    "bitsandbytes": "AdEMAMix AdEMAMix8bit Adagrad8bit Adam8bit AdamW8bit LAMB LAMB32bit LAMB8bit"
    " LARS LARS32bit LARS8bit Lion8bit PagedAdEMAMix PagedAdEMAMix8bit PagedAdam8bit PagedAdamW8bit"
    " PagedLion8bit PytorchLARS RMSprop8bit SGD8bit",
    "optimi": "StableAdamW",
    "pytorch_optimizer": "A2Grad AdaFactor AdaGO AdaMuon AdaNorm AdaShift AdaTAM Adalite AdamP"
    " AggMo Aida Amos ApolloDQN CAME Conda FAdam Fira FlashAdamW Fromage GaLore LARS Lamb MARS Muon"
    " MuonClip Nero NorMuon NovoGrad QHAdam RACS ROSE Ranger SCION SCIONLight SGDP SGDSaI SM3 SOAP"
    " SPlus Shampoo SpectralSphere StableAdamW TAM",
    "timm": "Adafactor AdafactorBigVision AdamP Lamb Lars Mars Muon NvNovoGrad SGDP",
    "torchao": "Adam4bit Adam8bit AdamFp8 AdamW4bit AdamW8bit AdamWFp8",
    "transformers": "Adafactor",
}
_TOGETHER = {
    "torch": "LBFGS",
    "dadaptation": "DAdaptAdaGrad DAdaptAdam DAdaptAdamPreprint DAdaptAdan DAdaptAdanIP DAdaptLion"
    " DAdaptSGD",
    "prodigyopt": "Prodigy ProdigyReference",
    "pytorch_optimizer": "ASGD AdaGC Adai AdamS AliG AvaGrad DAdaptAdaGrad DAdaptAdam DAdaptAdan"
    " DAdaptLion DAdaptSGD FriendlySAM GSAM LoRARite LookSAM Prodigy Ranger21 SAM SWATS WSAM",
}
_RANDOM = {
    "pytorch_optimizer": "APOLLO AdaHessian Alice BSAM DASH Gravity Kron Magma SPAM ScalableShampoo"
    " SophiaH",
    "timm": "Adahessian Kron",
}
_OTHER = {
    "torch": "SparseAdam",
    "pytorch_optimizer": "AdaBound AdamMini DeMo DistributedMuon EmoFact EmoLynx EmoNavi LOMO"
    " MADGRAD SaRA StableSPAM TRAC",
    "schedulefree": "AdamWScheduleFreeClosure RAdamScheduleFreeClosure SGDScheduleFreeClosure",
    "transformers": "LayerWiseDummyOptimizer",
}
_KINDS = {
    f"{package}.{name}": kind
    for kind, classes in zip(Kind, (_ELEMENTS, _WEIGHTS, _TOGETHER, _RANDOM, _OTHER), strict=True)
    for package, names in classes.items()
    for name in names.split()
}
# Options that change the kind of a package's classes, or of one class, at some values.
_OPTIONS: tuple[tuple[str, str, Callable[[Any], bool], Kind], ...] = (
    ("bitsandbytes.", "optim_bits", lambda bits: bits == 8, Kind.WEIGHTS),
    ("bitsandbytes.", "max_unorm", bool, Kind.WEIGHTS),
    ("bitsandbytes.", "percentile_clipping", lambda percent: percent < 100, Kind.WEIGHTS),
    ("bitsandbytes.", "uses_config_override", bool, Kind.OTHER),
    ("optimi.", "triton", lambda is_on: is_on is not False, Kind.WEIGHTS),
    ("optimi.", "gradient_release", bool, Kind.OTHER),
    *(
        ("pytorch_optimizer.", name, bool, Kind.WEIGHTS)
        for name in ("adanorm", "cautious", "sn", "stable_adamw", "use_gc")
    ),
    ("pytorch_optimizer.Adan", "max_grad_norm", bool, Kind.TOGETHER),
    ("pytorch_optimizer.Lamb", "pre_norm", bool, Kind.TOGETHER),
    ("timm.", "caution", bool, Kind.WEIGHTS),
    ("timm.", "clipping_threshold", lambda threshold: threshold is not None, Kind.WEIGHTS),
    ("timm.Lamb", "max_grad_norm", lambda norm: norm is not None, Kind.TOGETHER),
    ("torchao.", "bf16_stochastic_round", bool, Kind.RANDOM),
)
_declared: dict[type, Kind] = {}


def declare_optimizers(*, elementwise: Collection[type] = (), whole: Collection[type] = ()) -> None:
    """Says what optimizers of a user's classes act on, in this process.

        ringcomm.parallel.declare_optimizers(elementwise=[MyLion], whole=[MyMuon])

    For models that are split by hand, whose optimizers ask at their first step: layers of
    ringcomm.nn, tensor_parallelize(), expert_parallelize() and pipeline.Pipeline. Functions that
    take an optimizer have the same arguments.

    Args:
        elementwise: classes whose step treats each element of a weight by itself, as AdamW's does.
        whole: classes whose step treats each weight by itself, and needs all of it, as Muon's does.

    Raises:
        TypeError: an argument is no collection of classes.
        ValueError: a class is in both, or is known to need full weights and said to be elementwise.
    """
    _declared.update(_said(elementwise, whole))


def needs_whole(
    optimizer: torch.optim.Optimizer,
    elementwise: Collection[type] = (),
    whole: Collection[type] = (),
    *,
    is_copied: bool = True,
    say: str = "pass {}",
) -> bool:
    """Whether an optimizer needs full weights, each by itself; else it is elementwise.

    Args:
        optimizer: of any class.
        elementwise: see declare_optimizers().
        whole: see declare_optimizers().
        is_copied: whether copies of it step on parts of weights, as in zero.shard().
        say: how the user says a word.

    Raises:
        TypeError: neither is so, or nobody knows.
        ValueError: a word is wrong; see declare_optimizers().
    """
    of_class, said = type(optimizer), _declared | _said(elementwise, whole)
    if hasattr(optimizer, "is_whole"):  # offload.Offloaded has asked
        return bool(optimizer.is_whole)
    name, kind = of_class.__name__, _kind_of(optimizer)
    if kind in (None, Kind.ELEMENTS):
        kind = said.get(of_class, kind)
    reason = None if kind in (None, Kind.ELEMENTS, Kind.WEIGHTS) else kind.value
    if reason := reason or (_misfit(optimizer) if is_copied else None):
        raise TypeError(
            "an optimizer of weights that are split must update each weight by itself, as AdamW and"
            f" Muon do, but {name} {reason}: use another optimizer, or DistributedDataParallel"
        )
    if kind is None:
        words = (say.format(f"{word}=[{name}]") for word in ("elementwise", "whole"))
        raise TypeError(
            "an optimizer of weights that are split must update each weight by itself, and ringcomm"
            " does not know whether {} does: {} if its step treats each element of a weight by"
            " itself, as AdamW's does, or {} if it needs full weights, as Muon's does".format(
                name, *words
            )
        )
    return kind is Kind.WEIGHTS


def known_kind(of_class: type) -> Kind | None:
    """What a class of the table acts on by default; None for another."""
    return _KINDS.get(_full_name(of_class))


def _full_name(of_class: type) -> str:
    return f"{of_class.__module__.partition('.')[0]}.{of_class.__name__}"


def _kind_of(optimizer: Any) -> Kind | None:
    """What an optimizer of the table acts on with its options."""
    kind, name = known_kind(type(optimizer)), _full_name(type(optimizer))
    if kind is None:
        return None
    own = [vars(optimizer), optimizer.defaults, *optimizer.param_groups]
    own += [vars(vars(optimizer)[key]) for key in ("args", "mng") if key in vars(optimizer)]
    found = [
        then
        for owner, option, is_on, then in _OPTIONS
        if name.startswith(owner) and any(option in each and is_on(each[option]) for each in own)
    ]
    return max([kind, *found], key=[*Kind].index)


def _said(elementwise: Collection[type], whole: Collection[type]) -> dict[type, Kind]:
    said: dict[type, Kind] = {}
    for word, classes in (("elementwise", elementwise), ("whole", whole)):
        kind = Kind.ELEMENTS if word == "elementwise" else Kind.WEIGHTS
        if isinstance(classes, type) or not all(isinstance(each, type) for each in classes):
            raise TypeError(f"{word}= must be a list of classes, such as [MyClass], got {classes}")
        for each in classes:
            known = known_kind(each) or kind
            if said.setdefault(each, kind) is not kind:
                raise ValueError(f"{each.__name__} is in elementwise= and in whole=: pass it once")
            if known not in (kind, Kind.ELEMENTS):
                raise ValueError(
                    f"{word}= names {each.__name__}, which {known.value}: leave it out"
                )
    return said


def _misfit(optimizer: torch.optim.Optimizer) -> str | None:
    """What prevents copies of an optimizer that step on parts of its weights."""
    leaves = tree_leaves({**attributes_of(optimizer), "defaults": None})
    if any(isinstance(leaf, (Tensor, nn.Module, torch.optim.Optimizer)) for leaf in leaves):
        return "keeps tensors, a module or an optimizer outside of its groups and state"
    states = (value for state in optimizer.state.values() for value in state.values())
    if any(isinstance(value, Tensor) and value.is_meta for value in states):
        return "already has state on the meta device"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "is asked for a graph through its updates, by differentiable=True"
    return None
