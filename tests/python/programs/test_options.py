"""Every option of every command: the values that it refuses, where it is idle, what it changes.

An option or a command that option_table.py does not have fails a test.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import cross_entropy
import front_door
import operations
import pytest
import torch
import torch.distributed as dist
from collectives import AVAILABLE
from option_runs import seen
from option_table import FORMS, MODES, OTHERS, VALUES
from ranks import run_ranks
from test_cli import TUNED
from torch import nn

import _ringcomm.command
import ringcomm
from _ringcomm import start as cli
from _ringcomm.status import EXIT_BAD_INPUT
from ringcomm import tuning
from ringcomm.cost_model import Costs
from ringcomm.integrations.transformers import tensor_parallelize
from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import ParallelDims, parallelize
from ringcomm.parallel.pipeline.schedules import Action, Timeline
from ringcomm.trace import merge
from ringcomm.trace.dumps import flight_dump


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


OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}
LLAMA = "plan --model llama-7b --gpus 8"
# A message of None: the line is right.
LINES: list[tuple[str, str | None]] = [
    ("", "COMMAND"),
    ("juggle", "invalid choice: 'juggle'"),
    ("benhc", "; did you mean bench?"),
    ("plan --gpus 8", "arguments are required: --model"),
    ("plan", "arguments are required: --model, --gpus"),
    ("plan --model gpt2 --gpus 1 --hardware h10", "did you mean h100?"),
    ("plan --model gpt2 --gpus 1 --systems ddp,zero4", "did you mean zero3?"),
    ("plan --model llama-8b --gpus 8", "known are llama-7b, llama-13b"),
    (f"{LLAMA} --why 100000", "--why must be 1 to "),
    (f"{LLAMA} --memory 80M", "less than the 1.00 GiB that the driver uses"),
    (f"{LLAMA} --tuning /proc/version", "not JSON"),
    ("doctor --dump {new}", "--dump needs --job PID"),
    ("doctor --job 7 --dump {new} --seconds 1", "--seconds has no effect with --job PID"),
    ("doctor --job 7 --json --verdict", "--json has no effect with --verdict"),
    ("trace", "give one of: -- COMMAND, --merge FOLDER"),
    ("trace -- true --merge x", None),
    ("trace --merge {folder} -- true", "give one of"),
    ("trace --merge {folder}/a -o {new}", None),  # as in RINGCOMM_FLIGHT_DUMP
    ("trace --merge /proc/self/fdinfo", "ringcomm trace: nothing was recorded"),
    ("trace -o {new} -- /no/such/program", "cannot run /no/such/program: No such file"),
    ("trace -o {new} -- {file}", "cannot run {file}: "),
    ("trace --html ringcomm-trace.json -- true", "is given for two files"),
    ("show trace --trace {file} -o {file}", "is given for two files"),
    ("show trace --trace a.json -o {file}", "is given for two files"),
    ("show loss --ranks 5", "5 ranks cannot share them"),
    ("show trace", "page trace needs --trace FILE"),
    ("show memory --model nothing", "'nothing' is neither a model nor a config.json"),
    ("show tensor --model mixtral-8x7b", "mixtral-8x7b has experts"),
    ("tune --sizes 1k,1024", "at least 2 different sizes"),
    ("bench juggle", "invalid choice: 'juggle'"),
    ("bench --seconds 1 all_reducee", "did you mean all_reduce?"),
    ("bench --html {new} --json {new}", "is given for two files"),
    ("bench --json barrier barrier", None),
    ("bench barrier --sizes 1k", "--sizes has no effect with op barrier"),
    ("bench --graph 3 all_reduce", "--graph has no effect with device cpu"),
    ("bench --ops barrier cores", "'barrier' is none of"),
    ("bench --ops broadcast cores", None),
    ("bench --mps all_reduce --device cuda", None),
    ("bench all_reduce,systems", "systems must be the only operation"),
    ("bench all_reduce --peers nccl", "add --device cuda"),
    ("bench all_reduce --peers carrier_pigeon", "has no backend 'carrier_pigeon'"),
    ("bench all_reduce --peers gloo", "built without gloo"),
    ("bench cross_entropy --world-size 2 --peers torch", "--peers are for one rank"),
    ("bench cross_entropy --device abacus", "this torch finds no abacus device here"),
    ("bench sendrecv --world-size 1", "at least two ranks"),
    ("bench all_reduce --device no_such_device", "no no_such_device device here"),
    ("bench all_reduce --nccl-library /nowhere/libnccl.so", "/nowhere/libnccl.so"),
    ("bench cores --tuning /proc/version", "tuning file '/proc/version': not JSON"),
    ("bench systems --plot it.doc", "--plot it.doc: the file name must end in one of"),
    *((line, "torchrun") for line in ("bench barrier --world-size 2", "tune", "doctor")),
]


@pytest.mark.parametrize(("line", "message"), LINES)
def test_a_wrong_line_is_one_line_and_status_2(
    line: str,
    message: str | None,
    paths: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """https://github.com/dathere/qsv/issues/4580: the output replaced the input of the same name.

    https://github.com/VIDA-NYU/reprozip/issues/10: an option was right on one side of a word only.
    """
    argv = [word.format(**paths) for word in line.split()]
    if message is None:
        assert vars(_ringcomm.command.read(argv))
        return
    monkeypatch.setitem(AVAILABLE, "gloo", lambda: False)  # as a torch built without it says
    for name, value in OF_TORCHRUN.items() if message == "torchrun" else ():
        monkeypatch.setenv(name, value)
    try:
        status: Any = cli.run(argv)
    except SystemExit as ended:
        status = ended.code
    assert status == EXIT_BAD_INPUT
    err = capsys.readouterr().err
    assert message.format(**paths) in err
    assert err.count("\n") == 1


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


def test_what_is_known_before_torch_is_imported_is_what_there_is() -> None:
    from ringcomm import show
    from ringcomm.planner import job

    assert {*_ringcomm.command.OPERATIONS} == {*operations.OPERATIONS, *front_door.ALONE}
    assert (*cross_entropy.TOLERANCES,) == front_door.LOSS_DTYPES
    assert (*cross_entropy.PEERS,)[3:] == front_door.LOSS_PEERS
    assert all(hasattr(torch, name) for name in front_door.DTYPES)
    assert tuple(job.SYSTEMS) == _ringcomm.command.SYSTEMS
    assert job.SCHEDULES == _ringcomm.command.SCHEDULES
    assert len(show.loss(4)["logits"]) == _ringcomm.command.NUM_CLASSES


# ---- a wrong option or object of Python: the error names it and the right one

Call = Callable[[nn.Module], object]
CALLS: list[tuple[Call, str]] = [
    (lambda m: ringcomm.Options(algoritm="ring"), "ringcomm.Options has no option 'algoritm'; did"),  # type: ignore[call-arg]
    (lambda m: Lomo(m, clip_grad=1.0), "Lomo has no option 'clip_grad'; did you mean 'clip_grad_"),
    (lambda m: AdaLomo(m, sed=1), "AdaLomo has no option 'sed'; did you mean 'seed'?"),
    (
        lambda m: parallelize(m, ParallelDims(), torch.optim.AdamW, bucket_byte=1),
        "ShardOptions.__init__() got an unexpected keyword argument 'bucket_byte'",
    ),
    (
        lambda m: Lomo(m, momentum=0.9),
        "Lomo has no option 'momentum': LOMO keeps no state for a weight; it has clip_grad_norm,",
    ),
    (
        lambda m: parallelize(m, ParallelDims(), torch.optim.AdamW(m.parameters())),  # type: ignore[arg-type]
        "optimizer must be a function that makes one: lambda params: AdamW(params)",
    ),
    (
        lambda m: ringcomm.nn.ColumnParallelLinear.from_linear(nn.ReLU()),  # type: ignore[arg-type]
        "from_linear() takes an nn.Linear, got ReLU",
    ),
    (
        lambda _: ringcomm.nn.VocabParallelEmbedding.from_embedding(nn.ReLU()),  # type: ignore[arg-type]
        "from_embedding() takes an nn.Embedding, got ReLU",
    ),
    (
        lambda m: parallelize(m, {"dp": 1}, torch.optim.AdamW),  # type: ignore[arg-type]
        "dims must be a ParallelDims, such as ParallelDims(dp=2), got dict",
    ),
    (
        lambda m: Lomo(torch.optim.AdamW(m.parameters())),  # type: ignore[arg-type]
        "Lomo takes the model, or its parameters, and not an optimizer: got AdamW",
    ),
    (
        tensor_parallelize,
        "Sequential is not a model of transformers: build its layers from ringcomm.nn",
    ),
]


def call_all(rank: int) -> None:
    for call, said in CALLS:
        layer = nn.Linear(4, 4)
        before = layer.weight.clone()
        with pytest.raises(TypeError) as error:
            call(nn.Sequential(layer))
        assert str(error.value).startswith(said), error.value
        assert torch.equal(layer.weight, before)


def test_the_error_names_what_was_meant() -> None:
    run_ranks(1, call_all)
