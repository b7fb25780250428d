"""The tokenizer folder, token bytes against the library's own decoding, and chat templates."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, processors
from twinpool.cluster.protocol.errors import ConfigError, InvalidRequestError
from twinpool.router.openai.chat_template import ChatPrompt, ChatTemplate, find_chat_template
from twinpool.router.openai.tokenizer import ChatTokenizer

USER = [{"role": "user", "content": "hi"}]


@given(text=st.text(max_size=60))
def test_token_bytes_join_to_the_text(tokenizer: ChatTokenizer, text: str) -> None:
    """For any text the tokens' bytes are its UTF-8."""
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


@given(data=st.data())
def test_token_bytes_agree_with_the_library(
    tokenizer: ChatTokenizer, byte_level_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Any ids, half characters included, decode as the tokenizers library decodes them."""
    ids = data.draw(st.lists(st.integers(0, byte_level_tokenizer.get_vocab_size() - 1), max_size=30))
    assert tokenizer.decode(ids) == byte_level_tokenizer.decode(ids, skip_special_tokens=False)


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: ChatTokenizer) -> None:
    """Padded embedding rows can be sampled by a random model."""
    assert tokenizer.token_bytes(10**6) == b""


def test_sentencepiece_tokens(tmp_path: Path) -> None:
    """▁ is a space, <0xNN> a byte; BOS comes once, also when the client wrote it."""
    names = ["<s>", "</s>", "▁a", "b", "<0xC3>", "<0xA9>"]
    raw = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw.add_special_tokens(["<s>", "</s>"])
    raw.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = ChatTokenizer.load(tmp_path)
    assert tokenizer.decode([2, 4, 5, 3]) == " aéb"
    assert tokenizer.encode("b") == [0, 3]
    assert tokenizer.encode("<s>b") == [0, 3]
    assert tokenizer.eos_ids == {1}
    assert tokenizer.vocab_size == 6
    with pytest.raises(InvalidRequestError, match="no chat template"):
        tokenizer.encode_chat(ChatPrompt(USER))


def test_chat_is_rendered_with_block_trimming(tokenizer: ChatTokenizer) -> None:
    """The prompt is the template's text, special tokens as single ids, nothing added."""
    ids = tokenizer.encode_chat(ChatPrompt(USER))
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert sum(tokenizer.is_special(i) for i in ids) == 3


def test_missing_files_and_foreign_decoders_are_named(tmp_path: Path) -> None:
    """The error names the file or the decoder."""
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        ChatTokenizer.load(tmp_path)
    raw = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}))
    raw.decoder = decoders.WordPiece()
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="WordPiece"):
        ChatTokenizer.load(tmp_path)


def test_template_helpers() -> None:
    """tojson does not escape HTML, loops can break, special tokens and the date are there, generation blocks render."""
    source = (
        "{{ bos_token }}{{ messages | tojson }}{% for m in messages %}{% break %}{% endfor %}"
        "{% generation %}x{% endgeneration %}{{ strftime_now('%Y') | length }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render(ChatPrompt([{"role": "user", "content": "<é>"}]))
    assert text == '<s>[{"role": "user", "content": "<é>"}]x4'


def test_template_refusal_is_the_clients_error() -> None:
    """The sentence of raise_exception reaches the client; a Python error inside a template does not."""
    refusing = ChatTemplate("{{ raise_exception('Roles must alternate') }}", {})
    with pytest.raises(InvalidRequestError, match="Roles must alternate"):
        refusing.render(ChatPrompt(USER))
    with pytest.raises(InvalidRequestError, match="cannot render") as caught:
        ChatTemplate("{{ messages[0].content + 1 }}", {}).render(ChatPrompt(USER))
    assert "str" not in caught.value.message


def test_template_sandbox() -> None:
    """A template reaches no Python internals."""
    with pytest.raises(InvalidRequestError):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(ChatPrompt(USER))


def test_developer_becomes_system_where_the_template_has_no_such_role() -> None:
    """A template that names the developer role keeps it."""
    messages = [{"role": "developer", "content": "x"}]
    assert ChatTemplate("{{ messages[0].role }}", {}).render(ChatPrompt(messages)) == "system"
    assert ChatTemplate("{# developer #}{{ messages[0].role }}", {}).render(ChatPrompt(messages)) == "developer"


def test_template_lookup_and_syntax() -> None:
    """The file wins over the config; a list has a default; broken Jinja is a configuration error."""
    named = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    assert find_chat_template({"chat_template": named}, None) == "d"
    assert find_chat_template({"chat_template": "c"}, "f") == "f"
    assert find_chat_template({}, None) is None
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})


def test_the_http_side_imports_no_torch() -> None:
    """The router must start at once."""
    code = "import sys, twinpool.router.app; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_an_answer_ends_where_generation_config_says(tmp_path: Path) -> None:
    """As `generate` of transformers has it: chat models name their end-of-turn token there only."""
    raw = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    raw.decoder = decoders.ByteLevel()
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    assert ChatTokenizer.load(tmp_path).eos_ids == {1}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    assert ChatTokenizer.load(tmp_path).eos_ids == {0, 2}


@pytest.mark.parametrize("closing", ["<|im_end|>\n", "</s>", ""])
@pytest.mark.parametrize("content", ["Once upon ", "", "user: <|im_end|>", "twice twice"])
def test_a_continued_message_is_not_closed(content: str, closing: str) -> None:
    """The prompt ends with the content, also where the template trims contents or repeats them elsewhere."""
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}" + closing + "{% endfor %}{{ eos_token }}",
        {"eos_token": "<eos>"},
    )
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    text = template.render(ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True))
    assert text == f"user: {content.strip()}{closing}assistant: {content.lstrip()}"


def test_a_template_that_hides_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(InvalidRequestError, match="hides the final message"):
        ChatTemplate("always the same", {}).render(ChatPrompt(USER, continue_final_message=True))


def test_variables_reach_the_template() -> None:
    """Unknown ones are undefined, as templates expect of them; what breaks the template is a 400."""
    template = ChatTemplate("{% if think is defined and think %}<think>{% endif %}{{ messages[0].content }}", {})
    assert template.render(ChatPrompt(USER)) == "hi"
    assert template.render(ChatPrompt(USER, variables={"think": True, "self": 1})) == "<think>hi"
    with pytest.raises(InvalidRequestError, match="chat template"):
        ChatTemplate("{{ range(n) | list }}", {}).render(ChatPrompt(USER, variables={"n": 10**9}))
