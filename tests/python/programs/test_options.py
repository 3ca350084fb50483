"""Every option of every command: the values that it refuses, where it is idle, what it changes.

An option or a command that the tables here do not have fails a test. Reports of other commands:
https://github.com/gem/oq-engine/pull/5527 accepted a negative number of cores,
https://github.com/MobileNativeFoundation/bluepill/issues/437 numbers that are none, and
https://github.com/automl/SMAC3/issues/58 one that is infinite as a float;
https://github.com/StefanMaron/BusinessCentral.AL.Runner/pull/3387 lost a run to a mistyped folder;
https://github.com/alexflint/go-arg/issues/246 has the status of bad usage, 2.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import front_door
import pytest
import torch
import torch.distributed as dist
from option_runs import seen
from ranks import run_ranks
from test_cli import TUNED

import _ringcomm.command
from _ringcomm.status import EXIT_BAD_INPUT
from ringcomm import tuning
from ringcomm.cost_model import Costs
from ringcomm.parallel.pipeline.schedules import Action, Timeline
from ringcomm.trace import merge
from ringcomm.trace.dumps import flight_dump


def around(least: int, most: int | None = None) -> list[str]:
    """What a whole number between the two may not be."""
    beyond = [str(least - 1), *([] if most is None else [str(most + 1)])]
    return [*beyond, "two", "1.5", "1e3", "nan", ""]


# By option a value that is right and has an effect, and those that are wrong. {new} is a path, and
# {folder} and {file} are a folder and a file; what {trace} and the like are is in `files`.
NEW = ("{new}", ["{folder}/none/file", "{folder}", "/proc/file"])
PICTURE = ("{new}.svg", NEW[1])
NEW_FOLDER = ("{new}", ["{folder}/none/folder", "{file}"])
NO_FILES = ["{folder}/none", "{folder}"]
SECONDS = ("1", ["nan", "inf", "-1", "1e999", "soon", ""])
COUNT = ("2", around(1))
BYTES = ("4k", ["0", "-1", "many", "1.0001k", "nan", "9" * 400])
SIZES = ("1k,4k", ["0", "1k,-1", "many", "1k,0", ","])
ONE_OF = ["juggle", ""]
NAMES = [*ONE_OF, ","]
FLAG: tuple[str | None, list[str]] = (None, [])
VALUES: dict[str, tuple[str | None, list[str]]] = {
    **dict.fromkeys(("--html", "--json"), NEW),
    "--plot": PICTURE,
    "--tuning": ("{tuning}", NO_FILES),
    "--timeline": ("{timeline}", NO_FILES),
    "--nccl-library": ("{file}", NO_FILES),
    "--trace": ("{trace}", NO_FILES),
    **dict.fromkeys(("--per-host", "--dp", "--pp", "--tp", "--ep", "--graph", "--why"), COUNT),
    **dict.fromkeys(("--layers", "--rows", "--gpus"), COUNT),
    "--width": ("64", COUNT[1]),
    **dict.fromkeys(("--verdict", "--collectives", "--sequence-parallel", "--force"), FLAG),
    **dict.fromkeys(("--mps", "--all"), FLAG),
    "--seconds": SECONDS,
    "--world-size": ("3", around(1, 64)),
    "--world-sizes": ("2,64", ["1,2", "2,65", "two", ","]),
    "--worlds": ("2,64", ["1,2", "2,65", "two", ","]),
    "--sizes": SIZES,
    "--repeats": ("2", around(0)),
    "--bytes": BYTES,
    "--memory": ("20GiB", ["80", "0", "-1", "many"]),
    "--sequence": ("128", ["-1", "many"]),
    "--model": ("gpt2", []),  # which the planner reads
    "--top": ("0", around(0)),
    "--hardware": ("l4", ONE_OF),
    "--systems": ("ddp,zero1", NAMES),
    "--schedules": ("1f1b,zbv", NAMES),
    "--checkpointing": ("full", NAMES),
    "--precision": ("fp32", ONE_OF),
    "--optimizer": ("sgd", ONE_OF),
    "--job": ("{job}", around(1, 1 << 22)),
    "--dump": NEW_FOLDER,
    "--ranks": ("2", around(2, 64)),
    "--micro-batches": ("4", around(1, 256)),
    "--events": ("64", around(64, 1 << 24)),
    "--seq": ("1", around(0)),
    "--merge": ("{recordings}", ["{folder}/none"]),
    "--layout": ("one", ONE_OF),
    "--clock": ("host", ONE_OF),
    "--dtype": ("int32", NAMES),
    "--dtypes": ("bfloat16", NAMES),
    "--ops": ("barrier,broadcast", NAMES),
    "--vocabularies": ("8,9", ["0", "8,-1", "many", ","]),
    "--threads": ("3", ["0", "-1", "two"]),
    "--tokens": ("8", ["0", "-1", "many", "nan"]),
    "--over": ("gloo", [","]),
    "--device": ("cuda", []),  # which torch has to find
    "--peers": ("torch", [","]),
}
# Where an option is another than elsewhere.
OTHERS: dict[str, dict[str, tuple[str | None, list[str]]]] = {
    "bench": {"--world-size": ("3", around(2, 64))},
    "doctor": {"--json": FLAG},
    "plan": {"--json": FLAG, "--tokens": BYTES, "--model": ("llama-7b", [])},
    "show": {"--output": NEW},
    "trace": {"--json": FLAG, "--output": NEW},
    "trace to torch": {"--json": FLAG, "--output": NEW_FOLDER},
    "tune": {},
    "bench OP": {"--peers": ("triton", NAMES)},
    "bench collectives": {"--peers": ("gloo,gloo", [","])},
    "bench systems": {"--systems": ("ddp blocking,ddp", [","])},
    "bench cores": {"--ops": ("broadcast", [*NAMES, "barrier"])},
}
PLAN = "model gpus tokens sequence top why json hardware memory per-host dp pp tp ep systems"
PLAN += " schedules checkpointing precision optimizer sequence-parallel"
PLAN_OF = "--model gpt2 --gpus 8"
SWEEP = "seconds repeats device world-size peers sizes dtype json html"
GPUS = "layout mps nccl-library clock graph plot"
LOSS = "seconds repeats device world-size threads tokens vocabularies dtypes peers json"
QUICK = "--seconds 0 --repeats 0 --json a.jsonl"
SMALL_LOSS = f"cross_entropy --tokens 16 --vocabularies 64 --dtypes float32 --threads 1 {QUICK}"
SYSTEMS_OF = f"systems --systems ddp --width 32 --layers 1 --tokens 4 --world-size 1 {QUICK}"
PROGRAM = "sh -c 'echo $RINGCOMM_TRACE_EVENTS >events; cp -r {recordings}/. $RINGCOMM_TRACE'"
# Of each form of a command: what follows the options, and those that have an effect. Another form
# shows the effect of those before a bar.
FORMS: list[tuple[str, str, str]] = [
    ("bench", "--world-size 2 --seconds 0", "world-size seconds html json"),
    ("doctor", "--world-size 2 --seconds 0", "world-size seconds json"),
    ("doctor", "--job {job}", "job json verdict dump"),
    ("doctor", "--job {job} --dump {new}", "json verdict"),
    ("doctor", "--job {job} --verdict", "dump"),
    ("plan", PLAN_OF, f"tuning | {PLAN}"),
    ("plan", f"{PLAN_OF} --hardware cpu-core", f"{PLAN} | tuning"),
    ("plan", f"{PLAN_OF} --json", f"{PLAN.replace(' top why json', '')} tuning |"),
    ("plan", "--collectives", "tuning"),
    ("show", "ring", "ranks bytes trace output"),
    ("show", "ring --trace {trace}", "seq output trace"),
    ("show", "memory", "model ranks output"),
    ("show", "lomo", "model output"),
    ("show", "pipeline", "ranks micro-batches timeline output"),
    ("show", "pipeline --timeline {timeline}", "output"),
    ("show", "tensor", "model ranks output"),
    ("show", "loss", "ranks output"),
    ("show", "trace --trace {trace}", "output trace"),
    ("trace", f"-- {PROGRAM}", "output events html"),
    ("trace", "--merge {recordings}", "output html"),
    (
        "tune",
        "--world-sizes 2 --sizes 1k,2k --seconds 0 --repeats 0 --force",
        "world-sizes sizes seconds repeats json force",
    ),
    ("bench collectives", f"all_reduce --sizes 1k {QUICK}", SWEEP),
    ("bench collectives", f"all_reduce --sizes 1k --device cuda {QUICK}", f"{SWEEP} | {GPUS}"),
    ("bench OP", SMALL_LOSS, LOSS),
    ("bench OP", f"{SMALL_LOSS} --device cuda", f"{LOSS} | layout mps"),
    (
        "bench systems",
        SYSTEMS_OF,
        "seconds repeats world-size systems over width layers rows tokens all plot html json",
    ),
    (
        "bench cores",
        f"cores --sizes 1k --ops all_reduce --threads 1 {QUICK}",
        "seconds repeats worlds threads ops sizes tuning json",
    ),
]
# Options that begin another form.
MODES = {"--job", "--collectives", "--merge", "--trace", "--timeline"}


def parser_of(command: str, rest: str) -> argparse.ArgumentParser:
    if command.startswith("bench "):
        return front_door.make_parser(rest.split(maxsplit=1)[0])
    parser = _ringcomm.command.OneLineParser(prog="ringcomm")
    _ringcomm.command._COMMANDS[command.split(maxsplit=1)[0]][0](parser)
    return parser


def words_of(rest: str, paths: dict[str, str]) -> list[str]:
    return [word.format(**paths) for word in shlex.split(rest)]


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        long = [option for option in action.option_strings if option.startswith("--")]
        if long and long[0] != "--help":
            yield long[0]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.json"
    file.write_text("{}", encoding="utf-8")
    files = dict.fromkeys(("file", "trace", "timeline", "tuning"), str(file))
    folders = dict.fromkeys(("folder", "recordings"), str(tmp_path))
    return {**files, **folders, "new": str(tmp_path / "new"), "job": "4194304"}


@pytest.mark.parametrize(("command", "rest", "effective"), FORMS)
def test_each_option(
    command: str,
    rest: str,
    effective: str,
    paths: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is accepted where it has an effect, and refused elsewhere and with a wrong value.

    All options are in front of a page, a program and an operation.
    """
    wanted = {f"--{name}" for name in effective.replace("|", "").split()}
    values = VALUES | OTHERS[command]
    after = words_of(rest, paths)

    def words(option: str, value: str | None) -> list[str]:
        given = [option, *([] if value is None else [value.format(**paths)])]
        return [command.split(maxsplit=1)[0], *given, *after]

    def refused(argv: list[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            _ringcomm.command.read(argv)
        assert ended.value.code == EXIT_BAD_INPUT, argv
        error = capsys.readouterr().err
        assert error.count("\n") == 1, argv
        assert error.startswith(f"ringcomm {argv[0]}"), argv
        return error

    parser = parser_of(command, rest)
    known = {*options_of(parser)}
    assert wanted <= known
    helps = [action.help for action in parser._actions]
    assert all(helps)
    assert len(helps) == len({*helps})  # each has its own
    for option in known:
        right, wrong = values[option]
        if option in wanted:
            _ringcomm.command.read(words(option, right))
            for value in wrong:
                assert option in refused(words(option, value)), (option, value)
        elif option not in MODES and option not in after:
            assert option in refused(words(option, right)), option
    files = {path.name for path in Path(paths["folder"]).iterdir()}
    assert files == {"a.json"}  # a check leaves nothing


# ---- what each option changes


def reduce_and_dump(rank: int, folder: Path, times: int) -> None:
    for _ in range(times):
        dist.all_reduce(torch.ones(1 << 10))
    flight_dump(f"{folder}/rank")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Two of each kind."""
    found = []
    for number in (2, 3):
        folder = tmp_path_factory.mktemp("files")
        recordings, file = folder / "recordings", folder / "file"
        env = {"RINGCOMM_ALGORITHM": "ring", "RINGCOMM_TRACE": str(recordings)}
        run_ranks(2, reduce_and_dump, recordings, number, fresh=True, env=env)
        merge.merge([recordings], folder / "trace")
        Timeline(1, (Action(0, "F", 0, 0, 0.0, number),)).export_chrome_trace(folder / "timeline")
        tuned = replace(TUNED, machine={"cpu": "", "cores": 2}, costs=Costs(copy_us=number))
        tuning.save(tuned, folder / "tuning")
        file.write_text("", encoding="utf-8")
        names = {name: str(folder / name) for name in ("trace", "timeline", "tuning", "file")}
        found.append({**names, "recordings": str(recordings), "new": "new", "job": "4194304"})
    return found


def compare(
    form: tuple[str, str, str], files: list[dict[str, str]], folder: Path, is_ignored: bool
) -> list[str]:
    """Options of a form beside which the command is seen to do what it does without them.

    Where `is_ignored`, the command sees the value of each option that it has without it.
    """
    command, rest, effective = form
    values, parser = VALUES | OTHERS[command], parser_of(command, rest)
    name, base = command.split(maxsplit=1)[0], words_of(rest, files[0])
    same, usual = [], seen([name, *base], folder / "usual")
    assert usual[0] == 0, usual
    for option in (f"--{name}" for name in effective.rpartition("|")[2].split()):
        value = values[option][0]
        given = [option, *([] if value is None else [value.format(**files[1])])]
        after = list(base)
        if option in after:
            at = after.index(option)
            del after[at : at + len(given)]
            given = given if value else []
        ignored = None
        if is_ignored:
            dest = parser._option_string_actions[option].dest
            ignored = dest, vars(_ringcomm.command.read([name, *base]))[dest]
        found = seen([name, *given, *after], folder / option, ignored)
        assert found[0] != EXIT_BAD_INPUT, found
        if found == usual:
            same.append(option)
    return same


def compare_as_rank(rank: int, form: Any, files: Any, *more: Any) -> list[str]:
    job = {"job": str(os.getpid())}
    return [] if rank else compare(form, [files[0] | job, files[1]], *more)


def compared(form: tuple[str, str, str], *more: Any) -> Any:
    """Where the form asks for a job, it is that of the rank that compares."""
    if "--job" not in form[1]:
        return compare(form, *more)
    return run_ranks(2, compare_as_rank, form, *more)[0]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(form[:2]))
def test_each_option_changes_what_is_seen(form: Any, files: Any, tmp_path: Path) -> None:
    assert compared(form, files, tmp_path, False) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(form[:2]))
def test_an_option_without_effect_is_found(form: Any, files: Any, tmp_path: Path) -> None:
    """All are, each alone. So two runs with the same options are seen to do the same."""
    names = form[2].rpartition("|")[2].split()
    assert compared(form, files, tmp_path, True) == [f"--{name}" for name in names]


def test_the_forms_are_those_of_all_commands() -> None:
    assert {command.split()[0] for command, _, _ in FORMS} == {*_ringcomm.command._COMMANDS}
    pages = {rest.split()[0] for command, rest, _ in FORMS if command == "show"}
    assert pages == {*_ringcomm.command.PAGES}
    of_bench = {rest.split()[0] for command, rest, _ in FORMS if command.startswith("bench ")}
    assert of_bench - {"all_reduce"} == {*front_door.ALONE}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan --gpus 8", "arguments are required: --model"),
        ("plan", "arguments are required: --model, --gpus"),
        ("doctor --dump {new}", "--dump needs --job PID"),
        ("doctor --job 7 --dump {new} --seconds 1", "--seconds has no effect with --job PID"),
        ("doctor --job 7 --json --verdict", "--json has no effect with --verdict"),
        ("trace", "give one of: -- COMMAND, --merge FOLDER"),
        ("trace -- true --merge x", None),
        ("trace --merge {folder} -- true", "give one of"),
        ("trace --merge {folder}/a -o {new}", None),  # as in RINGCOMM_FLIGHT_DUMP
        ("bench --html {new} --json {new}", "is given for two files"),
        ("show trace --trace {file} -o {file}", "is given for two files"),
        ("show trace --trace a.json -o {file}", "is given for two files"),
        ("trace --html ringcomm-trace.json -- true", "is given for two files"),
        ("show loss --ranks 5", "5 ranks cannot share them"),
        ("show trace", "page trace needs --trace FILE"),
        ("tune --sizes 1k,1024", "at least 2 different sizes"),
        ("plan --model gpt2 --gpus 1 --hardware h10", "did you mean h100?"),
        ("plan --model gpt2 --gpus 1 --systems ddp,zero4", "did you mean zero3?"),
        ("bench --seconds 1 all_reducee", "did you mean all_reduce?"),
        ("bench --json barrier barrier", None),
        ("bench barrier --sizes 1k", "--sizes has no effect with op barrier"),
        ("bench --graph 3 all_reduce", "--graph has no effect with device cpu"),
        ("bench --ops barrier cores", "'barrier' is none of"),
        ("bench --ops broadcast cores", None),
        ("bench --mps all_reduce --device cuda", None),
    ],
)
def test_options_together(
    line: str, message: str | None, paths: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A message of None: it is right.

    https://github.com/dathere/qsv/issues/4580: the output replaced the input of the same name.
    https://github.com/VIDA-NYU/reprozip/issues/10: an option was right on one side of a word only.
    """
    argv = [word.format(**paths) for word in line.split()]
    if message is None:
        assert vars(_ringcomm.command.read(argv))
        return
    with pytest.raises(SystemExit) as ended:
        _ringcomm.command.read(argv)
    assert ended.value.code == EXIT_BAD_INPUT
    assert message in capsys.readouterr().err


def test_a_wheel_has_no_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_ringcomm.command, "BENCHMARKS", tmp_path)
    for words in (["bench", "--help"], ["bench", "alreduce"], ["bench", "--seconds", "1", "cores"]):
        with pytest.raises(SystemExit):
            _ringcomm.command.read(words)
    out, err = capsys.readouterr()
    assert "all_to_all" not in out
    first, second = err.splitlines()
    assert "an installed package has the short comparison only" in first
    assert "did you mean all_reduce?" in first
    assert "an installed package has the short comparison only" in second
    assert "did you mean" not in second


def test_names_of_the_plan_are_the_planners() -> None:
    """They are known before the planner is imported, which needs torch."""
    from ringcomm.planner import job

    assert tuple(job.SYSTEMS) == _ringcomm.command.SYSTEMS
    assert job.SCHEDULES == _ringcomm.command.SCHEDULES


def test_the_page_loss_has_its_classes() -> None:
    from ringcomm import show

    assert len(show.loss(4)["logits"]) == _ringcomm.command.NUM_CLASSES
    assert json.dumps(show.loss(12))
