"""Bad arguments of `generate` and of `stream` are refused with the argument's name, at the call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import glax.models
from glax_cli import main

pytestmark = pytest.mark.fast
TINY = dict(model_type="gla", vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=2, intermediate_size=16)
GOOD = dict(tokens=jnp.ones((1, 3), jnp.int32), max_new_tokens=2)


@pytest.fixture(scope="module")
def model():
    return glax.models.from_config(TINY, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("function", [glax.models.generate, glax.models.stream])
@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "max_new_tokens must be at least 0, got -1", dict(max_new_tokens=-1)),
        (TypeError, "max_new_tokens must be an integer, known while tracing, got 2.0", dict(max_new_tokens=2.0)),
        (ValueError, "tokens must be from 0 to 31, got 40", dict(tokens=jnp.full((1, 3), 40))),
        (ValueError, "padding must be 'right' or 'left', got 'top'", dict(padding="top")),
        (ValueError, "temperature must be at least 0, got -1.0", dict(temperature=-1.0)),
        (ValueError, "top_k must be at least 1, got 0", dict(top_k=0)),
        (ValueError, "top_p must be above 0 and at most 1, got 0", dict(top_p=0)),
        (
            ValueError,
            "top_k must be None at temperature 0, which takes the likeliest token, got 3: pass a temperature above 0",
            dict(top_k=3),
        ),
        (
            ValueError,
            "top_p must be None at temperature 0, which takes the likeliest token, got 0.5: pass a temperature above 0",
            dict(top_p=0.5),
        ),
        (TypeError, "key must be one key of jax.random, such as jax.random.key(0), got 5", dict(key=5)),
        (
            ValueError,
            "key must be given where temperature is above 0, such as jax.random.key(0)",
            dict(temperature=1.0),
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_calls(model, function, error, text, arguments):
    with pytest.raises(error) as caught:
        function(model, **GOOD | arguments)
    assert str(caught.value) == text


def test_the_command_refuses_limits_of_a_draw_without_a_draw(capsys):
    assert main(["generate", "FOLDER", "--prompt", "x", "--top-k", "3"]) == 2
    wanted = "--top-k needs --temperature above 0, for 0 takes the likeliest token: got --top-k 3"
    assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("one", [jnp.int32, np.uint8, np.int64, np.array])
def test_integers_of_arrays_are_integers(model, one):
    """eos may be one, several in a sequence, or an array of them."""
    tokens, greedy = GOOD["tokens"], glax.models.generate(model, **GOOD | dict(max_new_tokens=5))
    ending = int(greedy[0, 1])
    wanted = glax.models.generate(model, tokens, 5, eos=[ending, 31])
    assert (wanted[0, 1:] == ending).all()
    for eos in ((one(ending), one(31)), jnp.asarray([ending, 31]), np.asarray([ending, 31])):
        assert (glax.models.generate(model, tokens, one(5), eos=eos) == wanted).all()
    assert (glax.models.generate(model, tokens, 5, eos=one(ending))[0, 1:] == ending).all()


@pytest.mark.parametrize("options", [{}, dict(temperature=1.0), dict(temperature=1.0, top_k=3, top_p=0.9)])
def test_no_key_is_used_twice(model, options):
    """JAX's own check of keys finds none that is used again, whether drawn in one loop or as a stream."""
    given = GOOD | options
    with jax.debug_key_reuse(True):
        key = dict(key=jax.random.key(7)) if options else {}
        whole = glax.models.generate(model, **given, **key)
        key = dict(key=jax.random.key(7)) if options else {}
        one_by_one = [tokens for tokens in glax.models.stream(model, **given, **key)]
    assert (np.stack(one_by_one, 1) == whole).all()
