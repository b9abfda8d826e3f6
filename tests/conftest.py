import io
import os
import signal
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import everlearn
from everlearn import nets, streams
from everlearn.sources import SOURCES


def pytest_configure():
    torch.set_num_threads(1)  # tests run side by side; more threads than cores only wait for each other


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def double():
    """Mathematics is checked in float64."""
    torch.set_default_dtype(torch.double)
    yield
    torch.set_default_dtype(torch.float)


class _Reads(TorchDispatchMode):
    """Counts values that are read from tensors, for each of which a device would be waited for."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        names = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
        self.count += operation.overloadpacket.__name__ in names
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def synced():
    """How often a call would wait for a device."""

    def count(call):
        with _Reads() as reads:
            call()
        return reads.count

    return count


@pytest.fixture
def small_stream():
    return lambda scenario="task": streams.split(*_some_digits(), tasks=3, scenario=scenario, class_order=range(6))


@pytest.fixture
def small_net():
    return lambda inputs, outputs: nets.mlp(inputs, outputs, hidden=(20,))


def _some_digits():
    (x, y), (x_test, y_test) = streams.digits_data()
    return (x[:500], y[:500]), (x_test[:200], y_test[:200])


@pytest.fixture
def two(tmp_path):
    """Call a function in two processes of one group; what each returns."""
    if not hasattr(os, "fork") or not dist.is_gloo_available():
        pytest.skip("needs fork and gloo")

    def call(function):
        children = []
        for rank in range(2):
            if not (pid := os.fork()):
                code = 1
                try:
                    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
                    torch.save(function(), tmp_path / f"{rank}.pt")
                    dist.barrier()
                    code = 0
                except BaseException:  # noqa: BLE001 - told, and the other process is not waited for
                    traceback.print_exc()
                finally:
                    os._exit(code)  # the parent's test session must not go on here
            children.append(pid)
        while children:
            pid, status = next((ended for c in children if (ended := os.waitpid(c, os.WNOHANG))[0]), (0, 0))
            if not pid:
                time.sleep(0.005)
                continue
            children.remove(pid)
            if status:  # the other one would wait for it
                for other in children:
                    os.kill(other, signal.SIGKILL)
                    os.waitpid(other, 0)
            assert status == 0
        (tmp_path / "meet").unlink(missing_ok=True)
        return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]

    return call


@pytest.fixture
def orphans(tmp_path):
    """Call a function in a process that is killed when somebody it has started leaves a file named by its pid; whether they end too."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs to see other processes")

    def alive(pid):
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    def wait_for(true, seconds=60):
        end = time.monotonic() + seconds
        while not true() and time.monotonic() < end:
            time.sleep(0.05)
        return true()

    def call(function):
        if not (pid := os.fork()):
            try:
                function()
            finally:
                os._exit(1)
        assert wait_for(lambda: len(list(tmp_path.glob("pid *"))) == 2)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        started = [int(path.name.split()[1]) for path in tmp_path.glob("pid *")]
        return wait_for(lambda: not any(map(alive, started)), 10)

    return call


@pytest.fixture
def shared_data():
    """The folder of real data sets, where there is one."""
    given = os.environ.get("EVERLEARN_DATA")
    folder = Path(given) if given else Path(__file__).parents[2] / "shared" / "data"
    if not (folder / "mnist").exists():
        pytest.skip("no real data here: set EVERLEARN_DATA to the folder that holds them")
    return folder


@pytest.fixture
def unverified(monkeypatch):
    """Published data sets without their checksums, so that small ones in the same layout are read."""
    monkeypatch.delenv("EVERLEARN_DATA", raising=False)

    def strip(files):
        return tuple(replace(file, md5=None, size=None) for file in files)

    for name, data in SOURCES.items():
        layouts = tuple(replace(one, files=strip(one.files), archives=strip(one.archives)) for one in data.layouts)
        monkeypatch.setitem(SOURCES, name, replace(data, layouts=layouts))


SMALL_NETS = {
    "mlp": lambda s: nets.mlp(s.inputs, s.outputs, hidden=(24, 16)),
    "cnn": lambda s: nets.cnn(s.inputs, s.outputs, channels=(6, 8)),
    "resnet": lambda s: nets.resnet(s.inputs, s.outputs, width=4, blocks=(1, 1)),
    "transformer": lambda s: nets.transformer(s.inputs, s.outputs, width=16, depth=1, heads=2),
}


@pytest.fixture
def isolated():
    """Learn three tasks, and see that the answers for those learned stay, bit for bit, also through a file."""

    def check(make_method, net, optimizer, stream, live=False):
        torch.manual_seed(0)
        make = SMALL_NETS.get(net, net)
        model, method, said = make(stream), make_method(), {}
        x = torch.cat([next(task.examples(12, "test")).x for task in stream])
        for task in stream:
            trained = everlearn.train(model, method, task, optimizer=optimizer, batch_size=32)
            optimizer = trained.optimizer if live else optimizer
            said[task.id] = method.predict(model, x, torch.full((len(x),), task.id))
            for number, before in said.items():
                assert torch.equal(method.predict(model, x, torch.full((len(x),), number)), before)
        assert not torch.equal(said[0], said[2])
        file = io.BytesIO()
        torch.save([model.state_dict(), method.state_dict()], file)
        file.seek(0)
        weights, state = torch.load(file, weights_only=True)
        other, again = make(stream), make_method()
        other.load_state_dict(weights)
        again.load_state_dict(state)
        for number, before in said.items():
            assert torch.equal(again.predict(other, x, torch.full((len(x),), number)), before)

    return check


@pytest.fixture
def exported():
    """Every task's export answers as the method does, stands alone, and is understood by torch.export."""

    def check(model, method, stream, tolerance=0.0):
        x = next(stream[0].examples(9, "test")).x
        for task in stream:
            truth = method.predict(model, x, torch.full((len(x),), task.id))
            alone = method.export(model, task.id)
            torch.testing.assert_close(alone(x), truth, rtol=tolerance, atol=tolerance)
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in alone.modules())
            with torch.no_grad():
                torch.testing.assert_close(torch.export.export(alone, (x,)).module()(x), truth, rtol=1e-4, atol=1e-5)
                for p in alone.parameters():
                    p.zero_()
            assert torch.equal(method.predict(model, x, torch.full((len(x),), task.id)), truth), "it shares nothing"

    return check
