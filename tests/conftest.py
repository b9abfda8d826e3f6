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
    torch.set_num_threads(1)  # tests run in parallel processes, and more threads than cores only compete


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def double():
    """Run a test with float64 as the default dtype."""
    torch.set_default_dtype(torch.double)
    yield
    torch.set_default_dtype(torch.float)


class _ScalarReads(TorchDispatchMode):
    """Count the values read from tensors, each of which would synchronize with a device."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        names = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
        self.count += operation.overloadpacket.__name__ in names
        return operation(*args, **(kwargs or {}))


@pytest.fixture
def count_synchronizations():
    """Count how often a call would synchronize with a device."""

    def count(call):
        with _ScalarReads() as scalar_reads:
            call()
        return scalar_reads.count

    return count


@pytest.fixture
def small_stream():
    return lambda scenario="task": streams.split(*_few_digits(), tasks=3, scenario=scenario, class_order=range(6))


@pytest.fixture
def small_net():
    return lambda inputs, outputs: nets.mlp(inputs, outputs, hidden=(20,))


def _few_digits():
    (x, y), (x_test, y_test) = streams.digits_data()
    return (x[:500], y[:500]), (x_test[:200], y_test[:200])


@pytest.fixture
def run_two_processes(tmp_path):
    """Call a function in two processes of one process group, and return the two results."""
    if not hasattr(os, "fork") or not dist.is_gloo_available():
        pytest.skip("needs fork and gloo")

    def call(function):
        children = []
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    dist.init_process_group(
                        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=rank, world_size=2
                    )
                    torch.save(function(), tmp_path / f"{rank}.pt")
                    dist.barrier()
                    code = 0
                except BaseException:  # noqa: BLE001 - reported, and the parent ends the other process
                    traceback.print_exc()
                finally:
                    os._exit(code)  # the child must not continue the parent's test session
            children.append(pid)
        while children:
            for child in list(children):
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid == 0:
                    continue
                children.remove(child)

                # A process whose peer has failed would wait for it forever.
                if status != 0:
                    for peer in children:
                        os.kill(peer, signal.SIGKILL)
                        os.waitpid(peer, 0)
                assert status == 0
            time.sleep(0.005)
        (tmp_path / "rendezvous").unlink(missing_ok=True)
        return [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]

    return call


@pytest.fixture
def check_workers_end(tmp_path):
    """Kill a process once its two workers have written files "pid <number>"; return whether the workers end too."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")

    def is_alive(pid):
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    def wait_until(condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
        return condition()

    def call(function):
        pid = os.fork()
        if pid == 0:
            try:
                function()
            finally:
                os._exit(1)
        assert wait_until(lambda: len(list(tmp_path.glob("pid *"))) == 2)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        workers = [int(path.name.split()[1]) for path in tmp_path.glob("pid *")]
        return wait_until(lambda: not any(map(is_alive, workers)), 10)

    return call


@pytest.fixture
def shared_data():
    """Return the folder of real data sets, or skip the test."""
    default_folder = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("EVERLEARN_DATA") or default_folder)
    if not (folder / "mnist").exists():
        pytest.skip("no real data: set EVERLEARN_DATA to the folder that contains them")
    return folder


@pytest.fixture
def without_checksums(monkeypatch):
    """Remove the checksums of published data sets, so that small ones in the same layout can be read."""
    monkeypatch.delenv("EVERLEARN_DATA", raising=False)

    def remove_checksums(files):
        return tuple(replace(file, md5=None, size=None) for file in files)

    for name, source in SOURCES.items():
        layouts = tuple(
            replace(layout, files=remove_checksums(layout.files), archives=remove_checksums(layout.archives))
            for layout in source.layouts
        )
        monkeypatch.setitem(SOURCES, name, replace(source, layouts=layouts))


SMALL_NETS = {
    "mlp": lambda s: nets.mlp(s.inputs, s.outputs, hidden=(24, 16)),
    "cnn": lambda s: nets.cnn(s.inputs, s.outputs, channels=(6, 8)),
    "resnet": lambda s: nets.resnet(s.inputs, s.outputs, width=4, blocks=(1, 1)),
    "transformer": lambda s: nets.transformer(s.inputs, s.outputs, width=16, depth=1, heads=2),
}


@pytest.fixture
def check_isolation():
    """Learn three tasks, and check that predictions for learned tasks stay bit-identical, also after save and load."""

    def check(make_method, net, optimizer, stream, reuse_optimizer=False):
        torch.manual_seed(0)
        make_net = SMALL_NETS.get(net, net)
        model = make_net(stream)
        method = make_method()
        x = torch.cat([next(task.examples(12, "test")).x for task in stream])

        def predict(model, method, task_id):
            return method.predict(model, x, torch.full((len(x),), task_id))

        predictions = {}
        for task in stream:
            trained = everlearn.train(model, method, task, optimizer=optimizer, batch_size=32)
            if reuse_optimizer:
                optimizer = trained.optimizer
            predictions[task.id] = predict(model, method, task.id)
            for task_id, expected in predictions.items():
                assert torch.equal(predict(model, method, task_id), expected)
        assert not torch.equal(predictions[0], predictions[2])

        file = io.BytesIO()
        torch.save([model.state_dict(), method.state_dict()], file)
        file.seek(0)
        model_state, method_state = torch.load(file, weights_only=True)
        restored_model = make_net(stream)
        restored_method = make_method()
        restored_model.load_state_dict(model_state)
        restored_method.load_state_dict(method_state)
        for task_id, expected in predictions.items():
            assert torch.equal(predict(restored_model, restored_method, task_id), expected)

    return check


@pytest.fixture
def check_export():
    """Check that a task's export predicts as the method does, is independent of it, and works with torch.export."""

    def check(model, method, stream, tolerance=0.0):
        x = next(stream[0].examples(9, "test")).x
        for task in stream:
            task_ids = torch.full((len(x),), task.id)
            expected = method.predict(model, x, task_ids)
            exported = method.export(model, task.id)
            torch.testing.assert_close(exported(x), expected, rtol=tolerance, atol=tolerance)
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in exported.modules())

            with torch.no_grad():
                program = torch.export.export(exported, (x,)).module()
                torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-5)
                for p in exported.parameters():
                    p.zero_()
            assert torch.equal(method.predict(model, x, task_ids), expected), "the export shares no parameters"

    return check
