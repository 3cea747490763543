"""Continuations: what is compiled, caches that grow, and options of drawing beside transformers' own processors."""

import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax.models
from glax.models import generation
from glax.models.tokens import Bytes
from glax.nn import Attention
from tests.compiling import Compiled

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
PROCESSED = pathlib.Path(__file__).parent / "logits_processors.json"  # written by make_logits_processors.py
TINY = dict(model_type="gla", vocab_size=256, hidden_size=16, num_hidden_layers=2, num_heads=2, intermediate_size=16)
HYBRID = TINY | dict(attn=dict(layers=[1], num_heads=2))


@functools.cache
def model(hybrid: bool = False):
    found = glax.models.from_config(HYBRID if hybrid else TINY, rngs=nnx.Rngs(3))
    found.embedding.embedding[...] *= 30  # else all logits are nearly equal
    return found


@nnx.jit
def pass_over(model, tokens):
    return model(tokens)


def logits_behind(model, tokens) -> np.ndarray:
    """Return the logits behind each of at most 64 tokens, from one pass."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(pass_over(model, padded))[0, : len(tokens)]


def one_by_one(model, prompt, count: int) -> list[int]:
    """Return the likeliest tokens, each from a pass over all tokens before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_behind(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


# ---- compiled once ---------------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_new_length_in_a_bucket_compiles_nothing(hybrid):
    rng = np.random.default_rng(0)
    glax.models.generate(model(hybrid), rng.integers(0, 256, (1, 18)), 5)
    list(glax.models.stream(model(hybrid), rng.integers(0, 256, (1, 18)), 5))
    with Compiled() as compiled:
        for length in (17, 25, 32):
            prompt = rng.integers(0, 256, length)
            written = np.asarray(glax.models.generate(model(hybrid), prompt[None], 5))[0].tolist()
            assert [int(x[0]) for x in glax.models.stream(model(hybrid), prompt[None], 5)] == written
    assert compiled.count == 0
    assert written == one_by_one(model(hybrid), prompt, 5)


@pytest.mark.fast
@pytest.mark.parametrize("is_known", [False, True])
def test_a_stream_compiles_two_programs_and_none_behind_its_second_token(is_known, monkeypatch):
    """is_known: whether the sizes of the call are known, so that no thread compiles; JAX compiles then at the first calls."""
    loaded, begun, start = model(), [], generation.start_compiling
    generation.compiled.clear()
    if is_known:
        list(glax.models.stream(loaded, np.ones((1, 3), int), 6))
    jax.clear_caches()

    def started(programs):
        begun.extend(start(programs))
        return begun

    monkeypatch.setattr(generation, "start_compiling", started)
    with Compiled() as compiled:
        pieces = glax.models.stream(loaded, np.ones((1, 3), int), 6)
        next(pieces), next(pieces)
    assert (compiled.count, len(begun)) == (2, 0 if is_known else 2)
    with Compiled() as compiled:
        assert len(list(pieces)) == 4
    assert compiled.count == 0


@pytest.mark.fast
def test_equal_models_in_two_folders_share_a_program(tmp_path):
    glax.models.generate(glax.models.from_pretrained(FIXTURES / "gla"), jnp.arange(5)[None], 2)
    shutil.copytree(FIXTURES / "gla", tmp_path / "other")
    other, size = glax.models.from_pretrained(tmp_path / "other"), generation.write_tokens._cache_size()
    assert other.folder == str(tmp_path / "other")
    glax.models.generate(other, jnp.arange(5)[None], 2)
    assert size and generation.write_tokens._cache_size() == size


@pytest.mark.fast
def test_lists_of_prompts_are_continued_as_each_alone():
    prompts = [[1, 2, 3], [7], list(range(20))]
    written = np.asarray(glax.models.generate(model(True), prompts, 4))
    assert written.tolist() == [one_by_one(model(True), prompt, 4) for prompt in prompts]
    traced = jax.jit(lambda tokens, lengths: glax.models.generate(model(True), tokens, 4, lengths=lengths))
    padded, lengths = generation.of_lists(prompts)
    np.testing.assert_array_equal(traced(padded, lengths), written)


# ---- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.fast
def test_caches_grow_with_the_longest_sequence(monkeypatch):
    monkeypatch.setattr(generation, "ROOM", 1)
    rooms, grown = [], glax.models.CausalLM.grown_states

    def noted(self, pools, max_length):
        rooms.append(max_length)
        return grown(self, pools, max_length)

    monkeypatch.setattr(glax.models.CausalLM, "grown_states", noted)
    prompts = [[1, 2, 3], list(range(15))]
    written = np.asarray(glax.models.generate(model(True), prompts, 40))
    assert rooms == [64] and written[:, :3].tolist() == [one_by_one(model(True), x, 3) for x in prompts]
    monkeypatch.setattr(generation, "ROOM", 512)
    np.testing.assert_array_equal(glax.models.generate(model(True), prompts, 40), written)
    assert rooms == [64]
    rooms.clear()
    end = int(written[0, 4])
    glax.models.generate(model(True), prompts[:1], 400, eos=end)
    glax.models.generate(model(), prompts, 600)
    assert rooms == []  # the sequence ended before, and this model has no caches


@pytest.mark.fast
def test_grown_states_hold_what_they_held_and_do_not_shrink():
    pools = model(True).initial_states(2, 4)
    _, pools = model(True).prefill(jnp.arange(4), pools, jnp.array([1]), jnp.array([0, 4]))
    larger = model(True).grown_states(pools, 9)
    assert jax.tree.map(jnp.shape, larger) == jax.tree.map(jnp.shape, model(True).initial_states(2, 9))
    logits, _ = model(True).step(jnp.array([4]), larger, jnp.array([1]))
    np.testing.assert_allclose(logits[0], logits_behind(model(True), np.arange(5))[-1], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="max_length must be at least 9, as pools have rows, got 8"):
        model(True).grown_states(larger, 8)


@pytest.mark.parametrize("slots", [None, [3, 0, -1], [2]])
@pytest.mark.parametrize("window", [None, 100])
def test_a_step_reads_the_keys_that_are_there_and_no_others(slots, window):
    """Rows behind the longest sequence are NaN: a product with them would show."""
    layer = Attention(16, num_heads=4, num_kv_heads=2, window=window, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (4, 700, 16))
    rows = [0, 1, 2, 3] if slots is None else slots
    _, pool = layer(x[:, :699], layer.initial_state(4, max_length=5000))
    poisoned = {name: x if name == "length" else x.at[:, 1024:].set(jnp.nan) for name, x in pool.items()}
    poisoned["length"] = poisoned["length"].at[0].set(40)
    given = None if slots is None else jnp.asarray(slots)
    y, after = jax.jit(layer.step)(x[jnp.asarray(rows), 699], poisoned, given)
    for i, row in enumerate(rows):
        if row < 0:
            continue
        length = 40 if row == 0 else 699
        own = jnp.concatenate([x[row, :length], x[row, 699:]])[None]
        np.testing.assert_allclose(y[i], layer(own)[0][0, -1], atol=2e-6, rtol=2e-5)
        assert int(after["length"][row]) == length + 1


# ---- how tokens are drawn --------------------------------------------------------------------------------------------


@pytest.mark.fast
@pytest.mark.parametrize("case", json.loads(PROCESSED.read_text()), ids=lambda case: case["name"])
def test_logits_are_processed_as_transformers_does(case):
    """The tokens that may be drawn, and their probabilities, are those of transformers' processors."""
    logits, seen = (
        jnp.asarray(case["logits"], jnp.float32),
        np.zeros((len(case["logits"]), len(case["logits"][0])), bool),
    )
    for row, tokens in enumerate(case["tokens"]):
        seen[row, tokens] = True
    options = case["options"]
    drawing = dict(temperature=options.get("temperature", 1.0), top_k=options.get("top_k"), top_p=options.get("top_p"))
    penalty = options.get("repetition_penalty")
    arguments = (jax.random.key(0), *drawing.values(), penalty, None, False)
    sampling, arrays = generation.checked_drawing(model(), len(logits), 1, *arguments)
    scores = glax.models.sampling.processed(sampling, logits, None if penalty is None else jnp.asarray(seen), arrays)
    want = np.array([[-np.inf if x is None else x for x in row] for row in case["scores"]])
    np.testing.assert_allclose(scores, want, rtol=2e-6)


@pytest.mark.fast
def test_a_penalty_counts_prompt_and_continuation():
    prompt, count, penalty = [5, 9, 5], 6, 0.1
    tokens = list(prompt)
    for _ in range(count):
        logits = logits_behind(model(), tokens)[-1]
        seen = np.isin(np.arange(256), tokens)
        tokens.append(int(np.where(seen, np.where(logits < 0, logits * penalty, logits / penalty), logits).argmax()))
    written = glax.models.generate(model(), [prompt, [1]], count, repetition_penalty=penalty)
    assert np.asarray(written)[0].tolist() == tokens[3:] != one_by_one(model(), prompt, count)


@pytest.mark.fast
def test_samples_read_a_prompt_once_and_follow_their_own_keys():
    drawn = dict(temperature=1.5, samples=3)
    written = np.asarray(glax.models.generate(model(True), [[1, 2], [3]], 8, key=jax.random.key(0), **drawn))
    assert written.shape == (6, 8) and len({tuple(row) for row in written}) == 6
    repeated = [[1, 2]] * 3 + [[3]] * 3
    again = glax.models.generate(model(True), repeated, 8, key=jax.random.key(0), temperature=1.5)
    np.testing.assert_array_equal(again, written)
    keys = jax.random.split(jax.random.key(1), 6)
    written = np.asarray(glax.models.generate(model(True), [[1, 2], [3]], 8, key=keys, **drawn))
    alone = glax.models.generate(model(True), [[3]], 8, key=keys[4:5], temperature=1.5)
    np.testing.assert_array_equal(alone[0], written[4])
    streamed = np.stack(list(glax.models.stream(model(True), [[1, 2], [3]], 8, key=keys, **drawn)), 1)
    np.testing.assert_array_equal(streamed, written)


@pytest.mark.fast
def test_log_probs_are_those_of_the_model_and_0_behind_the_end():
    prompt = [4, 8, 1]
    key = dict(key=jax.random.key(2), temperature=2.0, top_k=50, repetition_penalty=1.3)
    tokens, log_probs = glax.models.generate(model(), [prompt], 5, log_probs=True, **key)
    logits = logits_behind(model(), prompt + tokens[0].tolist())[len(prompt) - 1 : -1]
    want = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(tokens)[0][:, None], 1)[:, 0]
    np.testing.assert_allclose(log_probs[0], want, atol=2e-5)
    both = list(glax.models.stream(model(), [prompt], 5, log_probs=True, **key))
    np.testing.assert_array_equal(np.stack([x for _, x in both], 1), log_probs)
    end = int(tokens[0, 1])
    _, log_probs = glax.models.generate(model(), [prompt], 5, log_probs=True, eos=end, **key)
    assert (log_probs[0, 2:] == 0).all() and (log_probs[0, :2] < 0).all()


@pytest.mark.fast
def test_texts_end_a_sequence_with_the_token_that_completes_them():
    prompts = [[65, 66], [67]]
    key = dict(key=jax.random.key(5), temperature=3.0)
    free = np.asarray(glax.models.generate(model(), prompts, 12, **key))
    stop = Bytes().decode(free[0, 3:6])
    assert stop not in Bytes().decode(free[1])
    options = key | dict(stop=[stop, "never \0"], tokenizer=Bytes())
    written = np.asarray(glax.models.generate(model(), prompts, 12, **options))
    at = next(i for i in range(13) if stop in Bytes().decode(free[0, :i]))
    np.testing.assert_array_equal(written[0], np.where(np.arange(12) < at, free[0], free[0, at - 1]))
    np.testing.assert_array_equal(written[1], free[1])
    streamed = np.stack(list(glax.models.stream(model(), prompts[:1], 12, **options)), 1)
    assert streamed.shape == (1, at)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "samples must be at least 1, got 0", dict(samples=0)),
        (ValueError, "samples must be 1 at temperature 0", dict(samples=2)),
        (ValueError, "repetition_penalty must be above 0, got 0", dict(repetition_penalty=0)),
        (ValueError, "stop and tokenizer must be given together: .* got stop alone", dict(stop="a")),
        (ValueError, "stop and tokenizer must be given together: .* got tokenizer alone", dict(tokenizer=Bytes())),
        (ValueError, "stop must be texts of at least one character", dict(stop=["a", ""], tokenizer=Bytes())),
        (TypeError, "stop must be a text or several, got 3", dict(stop=[3], tokenizer=Bytes())),
        (TypeError, "log_probs must be", dict(log_probs=1)),
        (ValueError, "lengths must not be given where tokens is a list", dict(tokens=[[1], [2]], lengths=[1, 1])),
        (ValueError, "padding must not be given where tokens is a list", dict(tokens=[[1], [2]], padding="left")),
        (ValueError, r"tokens\[1\] must be a list of at least one token, got \[\]", dict(tokens=[[1], []])),
        (ValueError, "tokens must be from 0 to 255, got 256", dict(tokens=[[1], [256, 1]])),
        (TypeError, r"tokens\[0\]", dict(tokens=[[1.5]])),
        (
            ValueError,
            "key must be one key, or one for each of the 1 continuations, got 2 keys",
            dict(temperature=1.0, key=jax.random.split(jax.random.key(0), 2)),
        ),
    ],
    ids=range(14),
)
def test_bad_options_are_refused_at_the_call(error, text, arguments):
    for function in (glax.models.generate, glax.models.stream):
        with pytest.raises(error, match=text):
            function(model(), **dict(tokens=jnp.ones((1, 3), jnp.int32), max_new_tokens=2) | arguments)
