"""Chat templates: what transformers renders by them, and where a folder has them."""

import contextlib
import json
import pathlib

import pytest

from glax.server.templates import ChatTemplate, find_template

pytestmark = pytest.mark.fast
HERE = pathlib.Path(__file__).parent
FOUND = json.loads((HERE / "chat_templates.json").read_text())
MESSAGES = [dict(role="user", content="Hi")]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"


@pytest.mark.parametrize("case", FOUND["cases"], ids=[case["name"] for case in FOUND["cases"]])
def test_a_prompt_is_what_transformers_renders(case):
    template = ChatTemplate(case["template"], FOUND["tokens"])
    if "error" in case:
        with pytest.raises(ValueError) as refused:
            template.render(case["messages"], **case["variables"])
        assert case["error"] in str(refused.value)
    else:
        assert template.render(case["messages"], **case["variables"]) == case["text"]


def written(folder: pathlib.Path, **files) -> pathlib.Path:
    for name, content in files.items():
        name = name.replace("_json", ".json").replace("_jinja", ".jinja")
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "template",
    [TEMPLATE, [dict(name="rag", template="x"), dict(name="default", template=TEMPLATE)]],
    ids=["a text", "a list"],
)
def test_a_template_of_the_config_is_found(tmp_path, template):
    tokens = dict(bos_token="<s>", eos_token=dict(content="</s>", lstrip=False))
    found = find_template(written(tmp_path, tokenizer_config_json=dict(chat_template=template) | tokens))
    assert found is not None and found.render(MESSAGES) == "<s>Hi</s>"


def test_a_file_of_its_own_comes_before_the_config(tmp_path):
    files = dict(chat_template_jinja="é" + TEMPLATE, special_tokens_map_json=dict(bos_token="<b>"))
    found = find_template(written(tmp_path, tokenizer_config_json=dict(chat_template="x", eos_token=None), **files))
    assert found is not None and found.render(MESSAGES) == "é<b>Hi"


@pytest.mark.parametrize("config", [{}, dict(chat_template=None)])
def test_a_folder_without_a_template_has_none(tmp_path, config):
    assert find_template(tmp_path) is None
    assert find_template(written(tmp_path, tokenizer_config_json=config)) is None


def test_templates_without_a_default_are_named(tmp_path):
    written(tmp_path, tokenizer_config_json=dict(chat_template=[dict(name="rag", template="x")]))
    with pytest.warns(UserWarning, match=r"no template 'default', but \['rag'\]"):
        assert find_template(tmp_path) is None


@pytest.mark.parametrize("template", ["{% if %}", "{% endfor %}", "{{ 'a' | no_such_filter }}", 3, [3], [], {}])
def test_what_is_no_template_is_an_error(tmp_path, template):
    written(tmp_path, tokenizer_config_json=dict(chat_template=template))
    with pytest.raises(ValueError, match=r"chat_template in .*tokenizer_config\.json"):
        find_template(tmp_path)


def test_a_file_that_is_no_utf8_is_an_error(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja must be UTF-8, and is not at byte 2"):
        find_template(tmp_path)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ messages[9].content }}", "{{ 'a' + 1 }}", "{{ messages.x.y }}"]
)
def test_a_template_that_fails_names_the_messages(template):
    with pytest.raises(ValueError, match="the chat template"):
        ChatTemplate(template, {}).render(MESSAGES)


@pytest.mark.parametrize("template", ["{{ raise_exception(messages[0].content) }}", "{{ {}[messages[0].content].x }}"])
def test_an_error_does_not_repeat_a_long_message(template):
    with pytest.raises(ValueError, match="the chat template") as error:
        ChatTemplate(template, {}).render([dict(role="user", content="a" * 10**6)])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.pop() }}",
        "{{ messages[0].update(content='x') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ self.__init__ }}",
    ],
)
def test_a_template_reaches_nothing_outside(template):
    messages = [dict(role="user", content="Hi")]
    with contextlib.suppress(ValueError):
        assert ChatTemplate(template, {}).render(messages) == ""
    assert messages == MESSAGES
