"""The examples: continuous batching, and training by several processes."""

import importlib.util
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax.models
from tests.compiling import UNOPTIMIZED

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- serving ---------------------------------------------------------------------------------------------------------


def byte_model(width: int = 16, layers: int = 1, **options) -> glax.models.CausalLM:
    sizes = dict(vocab_size=256, hidden_size=width, num_hidden_layers=layers, num_heads=2, intermediate_size=width)
    return glax.models.from_config(dict(model_type="gla", **sizes, **options), rngs=nnx.Rngs(0))


def alone(model: glax.models.CausalLM, prompt: bytes, length: int) -> bytes:
    """Greedy bytes, one request at a time."""
    tokens = np.frombuffer(prompt, np.uint8)[None].astype(np.int32)
    return bytes(np.asarray(glax.models.generate(model, tokens, 30))[0, :length].tolist())


def test_served_text_is_that_of_each_request_alone(monkeypatch):
    """Mixed lengths, more requests than slots, some later, one prompt longer than a prefill, one answer of one byte."""
    serve = example("serve")
    model = byte_model(32, 2, num_kv_heads=1, initializer_range=0.2)
    rng = np.random.default_rng(0)
    lengths = [(5, 20), (70, 9), (1, 30), (17, 1), (70, 12), (5, 5), (1, 17), (17, 25), (5, 11)]
    requests = [
        serve.Request(str(i), rng.integers(32, 127, size, np.uint8).tobytes(), length, arrives=3 * (i // 4))
        for i, (size, length) in enumerate(lengths)
    ]
    server, largest, turns = serve.Server(model, capacity=3, rows=32), [0], [0]
    write = server.write

    def watched():
        largest[0] = max(largest[0], sum(x is not None for x in server.running))
        turns[0] += 1
        write()

    monkeypatch.setattr(server, "write", watched)
    got = dict(server.serve(requests))
    assert got == {request.name: alone(model, request.prompt, request.length) for request in requests}
    assert largest == [3] and turns[0] < sum(length for _, length in lengths)
    assert len(set(got.values())) == len(got)  # not the same text every time


def test_a_bad_request_is_refused_alone():
    serve = example("serve")
    model = byte_model()
    bad = {
        "None": (None, 5, "prompt must be bytes, a list or a tuple of at least one token, got None"),
        "text": ("the", 5, "prompt must be bytes, a list or a tuple of at least one token, got 'the'"),
        "empty": (b"", 5, "prompt must be bytes, a list or a tuple of at least one token, got b''"),
        "large": ([1, 2**31], 5, "prompt must hold tokens from 0 to 255, got 2147483648"),
        "vocabulary": ([1, 256], 5, "prompt must hold tokens from 0 to 255, got 256"),
        "negative": ([-1], 5, "prompt must hold tokens from 0 to 255, got -1"),
        "floats": ([1.0, 2.0], 5, "prompt must hold tokens from 0 to 255, got 1.0"),
        "nothing inside": ([1, None], 5, "prompt must hold tokens from 0 to 255, got None"),
        "flags": ([True], 5, "prompt must hold tokens from 0 to 255, got True"),
        "length": (b"the", None, "length must be an integer of at least 0, got None"),
        "below 0": (b"the", -1, "length must be an integer of at least 0, got -1"),
    }
    good = {"bytes": (b"the fox", 5), "list": (list(b"the fox"), 7), "none": (b"the", 0)}
    requests = [serve.Request(name, *x[:2]) for name, x in (bad | good).items()]
    got = dict(serve.Server(model, capacity=2, rows=4).serve(requests))
    assert {name: str(got.pop(name)) for name in bad} == {name: text for name, (_, _, text) in bad.items()}
    want = {name: alone(model, bytes(prompt), length) for name, (prompt, length) in good.items()}
    assert got == want | dict(list=list(want["list"]))


def test_a_prompt_of_bytes_is_refused_where_bytes_cannot_hold_the_tokens():
    serve, options = example("serve"), dict(hidden_size=8, num_hidden_layers=1, num_heads=2, intermediate_size=8)
    model = glax.models.from_config(dict(model_type="gla", vocab_size=300, **options), rngs=nnx.Rngs(0))
    want = np.asarray(glax.models.generate(model, jnp.array([[1, 2]]), 3))[0].tolist()
    requests = [serve.Request("bytes", b"\1\2", 3), serve.Request("list", [1, 2], 3)]
    got = dict(serve.Server(model, capacity=2, rows=4).serve(requests))
    assert str(got["bytes"]).startswith(
        "prompt must be a list or a tuple of tokens, because bytes cannot hold the 300 tokens"
    )
    assert got["list"] == want


@pytest.mark.parametrize("size", ["capacity", "rows", "max_length"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_a_server_of_no_size_is_refused(size, value):
    serve = example("serve")
    with pytest.raises(ValueError, match=f"{size} must be an integer of at least 1, got {value}"):
        serve.Server(byte_model(), **{size: value})


def test_a_request_beyond_the_cache_is_refused_and_one_that_fills_it_is_right():
    serve = example("serve")
    config = dict(
        model_type="gla", vocab_size=32, hidden_size=16, num_hidden_layers=2, num_heads=2, intermediate_size=16
    )
    attn = dict(layers=[1], num_heads=2)
    model = glax.models.from_config(config | dict(attn=attn), rngs=nnx.Rngs(0))
    server = serve.Server(model, capacity=2, rows=8, max_length=16)
    prompt = list(range(1, 13))
    requests = [serve.Request(str(length), prompt, length) for length in (4, 5)]
    got = dict(server.serve(requests))
    assert str(got["5"]) == "prompt and length must be at most max_length=16 tokens together, got 12 and 5"
    want = np.asarray(glax.models.generate(model, jnp.asarray([prompt]), 4))[0].tolist()
    assert got["4"] == want
    assert serve.has_caches(model) and not serve.has_caches(byte_model())
    ended = serve.Server(model, capacity=1, rows=8, max_length=16, ends=[want[1]])
    assert dict(ended.serve(requests[:1])) == {"4": want[: want.index(want[1]) + 1]}


# ---- training --------------------------------------------------------------------------------------------------------


def test_a_config_trains_by_the_example(tmp_path, monkeypatch, capsys):
    config = EXAMPLES.joinpath("train_gla.toml").read_text().replace("../README.md", str(EXAMPLES.parent / "README.md"))
    config = config.replace("num_hidden_layers = 2", "num_hidden_layers = 1").replace("length = 128", "length = 16")
    (tmp_path / "small.toml").write_text(config)
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "small.toml"), "--steps", "2"])
    example("train").main()
    assert "step 2/2: " in capsys.readouterr().out
    assert (tmp_path / "train-out" / "model" / "model.safetensors").is_file()
    (tmp_path / "small.toml").write_text(config.replace("length = 16", "length = 8"))
    with pytest.raises(SystemExit, match="2"):
        example("train").main()
    assert "is of another length: length was 16, got 8" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["train.py", str(tmp_path / "missing.toml")])
    with pytest.raises(SystemExit, match="2"):
        example("train").main()
    assert "No such file or directory" in capsys.readouterr().err


# ---- several processes -----------------------------------------------------------------------------------------------

STEPS = 6


def trainer(out, text, devices: int, data: int, sequence: int, port: int | None = None, process: int = 0):
    """A process that trains on so many simulated devices; one of two, if it is given their port."""
    command = [sys.executable, "-u", str(EXAMPLES / "train_multihost.py"), "--out", out, "--text", text]
    numbers = dict(steps=STEPS, every=1, batch=4, length=32, width=32, layers=1, data=data, sequence=sequence)
    numbers |= dict(processes=2, process=process) if port else {}
    command += [f"--{name}={number}" for name, number in numbers.items()]
    command += ["--coordinator", f"127.0.0.1:{port}"] if port else []
    options = dict(xla_force_host_platform_device_count=devices) | UNOPTIMIZED
    flags = " ".join(f"--{name}={value}" for name, value in options.items())
    env = os.environ | dict(JAX_PLATFORMS="cpu", XLA_FLAGS=flags, PYTHONPATH=str(EXAMPLES.parent))
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def two(out, text):
    """Two processes of two devices each: the batch between them, the sequence within."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [trainer(out, text, 2, 2, 2, port, process) for process in (0, 1)]


def losses(process) -> dict[int, float]:
    """By step, in all digits."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+)/\d+: (\S+) bits", out, re.M)}


def test_two_processes_train_as_one_and_survive_a_death(tmp_path, monkeypatch):
    """Losses bit for bit those of one process; after one of two is killed, two go on, and so does a single device. A run with
    another recipe does not."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} is followed by {i + 1}, and {i * i} is its square\n" for i in range(2000)))
    single = trainer(tmp_path / "single", text, 4, 2, 2)
    pair = two(tmp_path / "pair", text)
    for line in pair[1].stdout:
        if line.startswith("saved step 2"):
            pair[1].kill()
            break
    pair[1].communicate(timeout=60)
    pair[0].kill()  # it waits for the other, in vain
    before = pair[0].communicate(timeout=60)[0]
    assert pair[1].returncode == -9 and "saved step 1\n" in before and f"saved step {STEPS}" not in before
    whole = losses(single)
    assert sorted(whole) == list(range(1, STEPS + 1))

    shutil.copytree(tmp_path / "pair", tmp_path / "alone")
    pair, alone = two(tmp_path / "pair", text), trainer(tmp_path / "alone", text, 1, 1, 1)
    resumed = [losses(process) for process in pair]
    first = min(resumed[0])
    assert first > 1 and resumed == [{step: whole[step] for step in range(first, STEPS + 1)}] * 2
    went_on = losses(alone)
    assert sorted(went_on) == sorted(resumed[0])
    np.testing.assert_allclose(list(went_on.values()), list(resumed[0].values()), rtol=1e-4)
    in_words = re.findall(r"^step (\d+)/\d+: (\S+) bits", before, re.M)
    assert {int(step): float(loss) for step, loss in in_words}.items() <= whole.items()

    multihost = example("train_multihost")
    options = ["--length=32", "--width=32", "--layers=1", f"--out={tmp_path / 'single'}", f"--text={text}"]
    monkeypatch.setattr(sys, "argv", ["train_multihost.py", "--batch=8", *options])
    with pytest.raises(
        ValueError, match=f"step {STEPS} in .*single/checkpoints is of another batch: batch was 4, got 8"
    ):
        multihost.main(multihost.parse())
