"""OpenAI's interface, by its own client over loopback: answers are those of `generate` alone."""

import asyncio
import concurrent.futures
import itertools
import json
import threading

import jax
import numpy as np
import openai
import pytest

import glax.models
from glax.models.tokens import REPLACEMENT
from glax.server import Token
from glax.server.answers import Sample
from glax.server.app import Handover, Run
from glax.server.protocol import read_call
from tests.server.serving import NAME, TEXT, running

PROMPTS = ["The quick", "jumps over the lazy", "é à", "你好世界", "a" * 70]
MESSAGES = [dict(role="system", content="Be brief."), dict(role="user", content="Hello, 世界!")]


def rendered(messages=MESSAGES) -> str:
    return "<s>" + "".join(f"<|{m['role']}|>{m['content']}" for m in messages) + "<|assistant|>"


def test_models_are_listed(server):
    with server.client() as client:
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).owned_by == "glax"
        with pytest.raises(openai.NotFoundError) as missing:
            client.models.retrieve("other/model")
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion_is_what_generate_writes(server, alone, prompt):
    found = server.complete(prompt, max_tokens=20)
    assert found.choices[0].text == alone.text(prompt, 20) and found.choices[0].finish_reason == "length"
    tokens = alone.tokenizer.encode(prompt)
    assert tokens[0] == 0 and found.usage.prompt_tokens == len(tokens)
    assert found.usage.completion_tokens == 20 and found.usage.total_tokens == len(tokens) + 20
    assert found.object == "text_completion" and found.model == NAME and found.choices[0].logprobs is None
    assert server.complete(tokens, max_tokens=20).choices[0].text == found.choices[0].text


def test_without_max_tokens_a_completion_has_sixteen(server):
    assert server.complete("The").usage.completion_tokens == 16


def test_several_prompts_have_answers_in_their_order(server, alone):
    found = server.complete(PROMPTS, max_tokens=9, n=2)
    assert [choice.index for choice in found.choices] == list(range(10))
    want = [alone.text(prompt, 9) for prompt in PROMPTS for _ in range(2)]
    assert [choice.text for choice in found.choices] == want
    assert found.usage.prompt_tokens == sum(len(alone.tokenizer.encode(prompt)) for prompt in PROMPTS)
    assert found.usage.completion_tokens == 90
    tokens = [alone.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert [choice.text for choice in server.complete(tokens, max_tokens=9).choices] == want[::2]


def test_a_streamed_completion_is_the_whole_one(server, alone):
    pieces, reasons, usage = {}, {}, []
    for chunk in server.complete(PROMPTS, max_tokens=20, stream=True, stream_options=dict(include_usage=True)):
        usage.append(chunk.usage)
        for choice in chunk.choices:
            assert choice.index not in reasons
            pieces.setdefault(choice.index, []).append(choice.text)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert ["".join(pieces[i]) for i in range(5)] == [alone.text(prompt, 20) for prompt in PROMPTS]
    assert set(reasons.values()) == {"length"} and len(reasons) == 5
    assert all(x is None for x in usage[:-1]) and usage[-1].completion_tokens == 100
    assert max(map(len, pieces.values())) > 5


def test_a_stream_is_events_that_end_with_done(server):
    body = json.dumps(dict(model=NAME, prompt="The", max_tokens=3, temperature=0, stream=True))
    status, headers, content = server.call("POST", "/v1/completions", body)
    events = content.decode("ascii").split("\n\n")
    assert status == 200 and headers["content-type"] == "text/event-stream; charset=utf-8"
    assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: {") for event in events[:-2])
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-2])


def test_a_loop_that_lags_sends_what_has_come_together_and_stops_where_it_would(server):
    """The loop is held up until the scheduler has written the whole answer, far beyond the stop text."""
    options = dict(max_tokens=400, logprobs=1, stream_options=dict(include_usage=True), stream=True)
    whole = "".join(chunk.choices[0].text for chunk in server.complete("lag", **options) if chunk.choices)
    stop = whole[200:210]
    want = server.complete("lag", **options | dict(stop=stop))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        calling = pool.submit(server.complete, "lag", **options | dict(stop=stop))
        server.wait_until(lambda: server.scheduler.counts().running)
        loop = server.listener.servers[0].get_loop()
        loop.call_soon_threadsafe(server.wait_until, lambda: not server.scheduler.counts().running)
        found = calling.result()
    pieces = [[chunk.choices[0] for chunk in chunks if chunk.choices] for chunks in (want, found)]
    texts = ["".join(x.text for x in each) for each in pieces]
    assert texts[0] == texts[1] == whole[: whole.index(stop)]
    tokens = [[token for x in each if x.logprobs for token in x.logprobs.tokens] for each in pieces]
    assert tokens[0] == tokens[1] and len(pieces[1]) < len(tokens[1]) / 2
    assert [each[-1].finish_reason for each in pieces] == ["stop", "stop"]
    assert want[-1].usage == found[-1].usage


def test_a_call_that_is_far_behind_gives_others_their_turns(server, monkeypatch):
    monkeypatch.setattr("glax.server.app.MOST_EVENTS", 16)
    body = json.dumps(dict(model=NAME, prompt="lag", temperature=0, max_tokens=400, logprobs=1, stream=True)).encode()

    async def sent():
        run, turns, found = Run(server.app, read_call(server.app.served, body, is_chat=False), 0.0), [0], []

        async def others():
            while True:
                turns[0] += 1
                await asyncio.sleep(0)

        server.wait_until(lambda: not server.scheduler.counts().running and not server.scheduler.counts().waiting)
        other = asyncio.create_task(others())
        found = [(text, entries, turns[0]) async for _, text, entries, _ in run.pieces()]
        other.cancel()
        run.close()
        return found

    found = asyncio.run(sent())
    assert "".join(text for text, *_ in found) == server.complete("lag", max_tokens=400).choices[0].text
    counts = [len(entries) for _, entries, _ in found]
    assert sum(counts) == 400 and max(counts) <= 16 + 8  # with those that waited for the end of a character
    turns = [turn for *_, turn in found]
    assert all(begin < end for begin, end in itertools.pairwise(turns)) and len(turns) >= 400 // 16


def test_a_loop_is_woken_once_for_all_that_comes_before_it_takes():
    async def taken():
        loop, handover, queues, woken = asyncio.get_running_loop(), Handover(), [asyncio.Queue(), asyncio.Queue()], []
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: (woken.append(call), wake(*call))

        def put(queue, count=100):
            for number in range(count):
                handover.put(loop, queue, number)

        for n in range(2):
            threads = [threading.Thread(target=put, args=[queue]) for queue in queues]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = [[await queue.get() for _ in range(100)] for queue in queues]
            assert found == [list(range(100))] * 2 and n < len(woken) <= 2 * (n + 1)
        producing = [asyncio.to_thread(put, queue, 10_000) for queue in queues]  # while the loop takes
        await asyncio.wait_for(asyncio.gather(*producing, *(drained(queue, 10_000) for queue in queues)), 60)

    async def drained(queue, count):
        assert [await queue.get() for _ in range(count)] == list(range(count))

    asyncio.run(taken())


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_is_what_generate_writes_after_the_template(server, alone, name):
    tokens = alone.tokenizer.inner.encode(rendered(), add_special_tokens=False).ids
    assert tokens.count(0) == 1  # the template has written <s>, which is not doubled
    with server.client() as client:
        found = client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, **{name: 20})
        stream = client.chat.completions.create(model=NAME, messages=MESSAGES, temperature=0, stream=True, **{name: 20})
        deltas = [chunk.choices[0] for chunk in stream]
    assert found.choices[0].message.content == alone.text(tokens, 20) and found.choices[0].message.role == "assistant"
    assert found.usage.prompt_tokens == len(tokens) and found.object == "chat.completion"
    assert "".join(x.delta.content or "" for x in deltas) == found.choices[0].message.content
    assert deltas[0].delta.role == "assistant" and deltas[-1].finish_reason == "length"
    assert all(x.finish_reason is None for x in deltas[:-1])


def test_a_chat_without_a_limit_goes_on_to_the_longest(server):
    with server.client() as client:
        messages = [dict(role="user", content="b" * 500)]
        found = client.chat.completions.create(model=NAME, messages=messages, temperature=0)
    assert found.usage.total_tokens == 600 and found.choices[0].finish_reason == "length"


def test_a_special_token_ends_an_answer_and_is_not_written(server, alone):
    messages = [dict(role="user", content="a" * 500)]
    prompt = alone.tokenizer.inner.encode(rendered(messages), add_special_tokens=False).ids
    want = alone.tokens(prompt, 32)
    end = want.index(1)  # </s>, by chance: the weights are random
    assert alone.tokenizer.decode(want[: end + 2]) == alone.tokenizer.decode([*want[:end], want[end + 1]])
    with server.client() as client:
        options = dict(model=NAME, messages=messages, temperature=0, logprobs=True, stop="</s>")
        found = client.chat.completions.create(**options)
    assert found.choices[0].message.content == alone.tokenizer.decode(want[:end])
    assert found.choices[0].finish_reason == "stop" and found.usage.completion_tokens == end + 1
    assert len(found.choices[0].logprobs.content) == end


def test_the_text_of_a_special_token_ends_an_answer_that_spells_it(server):
    body = dict(model=NAME, prompt="The", stop="</s>", max_tokens=9)
    call = read_call(server.app.served, json.dumps(body).encode(), is_chat=False)
    assert call.requests[0].ends == {1}
    sample, found = Sample(server.app.served, call, 0), ""
    for piece in ("a</", "s", ">b"):
        for token in server.app.served.tokenizer.encode(piece, add_special_tokens=False):
            found += sample.push(Token(token))[0]
    assert (found, sample.reason) == ("a", "stop")


def test_parts_of_text_and_developers_are_read(server, alone):
    messages = [
        dict(role="developer", content="Be brief."),
        dict(role="user", content=[dict(type="text", text="a"), dict(type="text", text="b")]),
    ]
    want = [dict(role="system", content="Be brief."), dict(role="user", content="a\nb")]
    with server.client() as client:
        found = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=9)
    tokens = alone.tokenizer.inner.encode(rendered(want), add_special_tokens=False).ids
    assert found.choices[0].message.content == alone.text(tokens, 9)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begin, length", [(3, 1), (5, 4), (9, 3)])
def test_a_stop_text_ends_an_answer_before_it(server, alone, begin, length, stream):
    text = alone.text("The quick", 32)
    stop = text[begin : begin + length]
    found = server.complete("The quick", max_tokens=32, stop=["never there", stop], stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in found]
        got, reason = "".join(choice.text for choice in choices), choices[-1].finish_reason
    else:
        got, reason = found.choices[0].text, found.choices[0].finish_reason
        assert found.usage.completion_tokens < 32
    assert (got, reason) == (text[: text.index(stop)], "stop")
    server.wait_until_free()


def test_logprobs_are_those_of_generate(server, alone):
    tokens, logprobs = glax.models.generate(alone.model, [alone.tokenizer.encode("The quick")], 12, log_probs=True)
    tokens, logprobs = np.asarray(tokens)[0].tolist(), np.asarray(logprobs)[0]
    found = server.complete("The quick", max_tokens=12, logprobs=3).choices[0]
    np.testing.assert_allclose(found.logprobs.token_logprobs, logprobs, rtol=1e-4)
    assert len(found.logprobs.tokens) == len(found.logprobs.text_offset) == 12
    assert all(max(top.values()) == pytest.approx(value, rel=1e-4) for top, value in zip(
        found.logprobs.top_logprobs, found.logprobs.token_logprobs, strict=True))  # fmt: skip
    for token, offset in zip(found.logprobs.tokens, found.logprobs.text_offset, strict=True):
        assert token.startswith("bytes:") or found.text[offset:].startswith((token, REPLACEMENT))
    pieces = [chunk.choices[0] for chunk in server.complete("The quick", max_tokens=12, logprobs=3, stream=True)]
    streamed = [value for piece in pieces if piece.logprobs for value in piece.logprobs.token_logprobs]
    assert streamed == pytest.approx(found.logprobs.token_logprobs)
    assert server.complete("The quick", max_tokens=2, logprobs=0).choices[0].logprobs.top_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat_name_bytes(server, alone, stream):
    with server.client() as client:
        options = dict(model=NAME, messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2)
        found = client.chat.completions.create(stream=stream, **options)
        choices = [chunk.choices[0] for chunk in found] if stream else [found.choices[0]]
    content = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    raw = b"".join(bytes(entry.bytes) for entry in content)
    prompt = alone.tokenizer.inner.encode(rendered(), add_special_tokens=False).ids
    assert raw.decode(errors="replace") == alone.text(prompt, 12) and len(content) == 12
    for entry in content:
        assert len(entry.top_logprobs) == 2 and entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
        assert entry.top_logprobs[0].bytes == entry.bytes and entry.logprob == pytest.approx(
            entry.top_logprobs[0].logprob
        )


def test_equal_seeds_have_equal_answers(server, alone):
    options = dict(max_tokens=12, temperature=1.3, top_p=0.9, seed=7)
    one, three = server.complete("The", **options), server.complete("The", n=3, **options)
    texts = [choice.text for choice in three.choices]
    assert texts[0] == one.choices[0].text and len(set(texts)) == 3
    assert server.complete("The", n=3, **options).choices[2].text == texts[2]
    tokens = alone.tokenizer.encode("The")
    want = glax.models.generate(alone.model, [tokens], 12, temperature=1.3, top_p=0.9, key=jax.random.key(7)[None])
    assert texts[0] == alone.tokenizer.decode(np.asarray(want)[0].tolist())
    assert server.complete("The", **options | dict(seed=-8)).choices[0].text != texts[0]
    with_k = server.complete("The", max_tokens=12, temperature=2, seed=1, extra_body=dict(top_k=1))
    assert with_k.choices[0].text == alone.text("The", 12)


def test_without_a_seed_answers_differ(server):
    found = server.complete("The", max_tokens=20, temperature=2, n=4)
    assert len({choice.text for choice in found.choices}) == 4


def test_penalties_take_effect(server, alone):
    want = alone.text("The quick", 20, repetition_penalty=1.7)
    found = server.complete("The quick", max_tokens=20, extra_body=dict(repetition_penalty=1.7))
    assert found.choices[0].text == want
    found = server.complete("The quick", max_tokens=200, presence_penalty=2.0, frequency_penalty=2.0, logprobs=0)
    assert len(set(found.choices[0].logprobs.tokens)) > 150


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", 2.1), ("temperature", "1"), ("temperature", True), ("top_p", -0.1), ("top_p", 1.1), ("n", 0),
        ("n", 17), ("n", 1.5), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**30), ("seed", 2**63),
        ("seed", 0.5), ("stop", [""]), ("stop", [1]), ("stop", ["a"] * 17), ("stop", "a" * 257), ("stop", {}),
        ("logprobs", 21), ("logprobs", True), ("presence_penalty", 2.5), ("frequency_penalty", "x"), ("top_k", 0.5),
        ("repetition_penalty", 0), ("stream", 1), ("stream_options", {"include_usage": True}), ("logit_bias", {"5": 1}),
        ("best_of", 2), ("echo", True), ("suffix", "x"), ("min_p", 0.1), ("an_unknown_field", 1),
        ("prompt", []), ("prompt", [[]]), ("prompt", [10**6]), ("prompt", [-1]), ("prompt", [True]),
        ("prompt", [["a"]]), ("prompt", 5), ("prompt", ["a"] * 17), ("prompt", [1.5]), ("prompt", None), ("model", 3),
        ("messages", MESSAGES),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(server, field, value):
    body = dict(model=NAME, prompt="The", max_tokens=2) | {field: value}
    status, _, content = server.call("POST", "/v1/completions", json.dumps(body))
    error = json.loads(content)["error"]
    assert status == 400 and error["param"] == field and error["type"] == "invalid_request_error", content
    assert field in error["message"]


@pytest.mark.parametrize(
    "field, value",
    [
        ("tools", [dict(type="function", function=dict(name="f"))]), ("tool_choice", "required"),
        ("response_format", dict(type="json_object")), ("modalities", ["audio"]), ("reasoning_effort", "low"),
        ("top_logprobs", 2), ("logprobs", 1), ("messages", []), ("messages", "Hi"), ("messages", [3]),
        ("messages", [dict(role="user")]), ("messages", [dict(role="bot", content="x")]),
        ("messages", [dict(role="user", content=[dict(type="image_url", image_url=dict(url="x"))])]),
        ("messages", [dict(role="user", content="x", weight=1)]), ("messages", [dict(role="user", content="x" * 4000)]),
        ("messages", [dict(role="assistant", content="x", tool_calls=[dict(id="1")])]), ("prompt", "x"),
        ("chat_template_kwargs", [1]), ("chat_template_kwargs", dict(messages=[])), ("echo", True),
    ],
)  # fmt: skip
def test_what_is_not_supported_in_chats_is_refused_by_name(server, field, value):
    body = dict(model=NAME, messages=MESSAGES, max_tokens=2) | {field: value}
    status, _, content = server.call("POST", "/v1/chat/completions", json.dumps(body))
    error = json.loads(content)["error"]
    assert status == 400 and error["param"].startswith(field) and error["type"] == "invalid_request_error", content


def test_fields_that_change_nothing_are_ignored(server, alone):
    harmless = dict(user="me", metadata={"a": "b"}, store=True, service_tier="auto", best_of=1, echo=False, suffix=None)
    found = server.complete("The", max_tokens=5, extra_body=harmless | dict(logit_bias={}, min_p=0))
    assert found.choices[0].text == alone.text("The", 5)
    with server.client() as client:
        options = dict(tools=[], response_format=dict(type="text"), modalities=["text"], parallel_tool_calls=False)
        client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=1, extra_body=options)


def test_too_long_a_prompt_and_another_model_are_named(server):
    with pytest.raises(openai.BadRequestError, match=r"at most 600 tokens together, got 20 and 590") as long:
        server.complete("The quick brown", max_tokens=590, extra_body=dict(prompt=[5] * 20))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="model must be 'tiny-gla'"):
        server.complete("The", model="other")


def test_prefixes_that_requests_share_change_no_answer(folder, alone):
    prompts = [TEXT * 8 + end for end in ("a", "b", TEXT, "The")]
    with running(folder, "--capacity", "2", "--rows", "64", "--prefix-bytes", str(1 << 24)) as server:
        for _ in range(2):
            found = server.complete(prompts, max_tokens=8)
            assert [choice.text for choice in found.choices] == [alone.text(prompt, 8) for prompt in prompts]
        assert found.usage.prompt_tokens_details.cached_tokens > 100
        server.wait_until_free()


def test_a_model_on_several_devices_answers_as_on_one(folder, alone):
    with running(folder, "--capacity", "2", "--tensor", "2") as server:
        assert server.scheduler.model.head.kernel[...].sharding.mesh.shape == {"tensor": 2}
        assert server.complete("The quick", max_tokens=12).choices[0].text == alone.text("The quick", 12)
