"""What the commands of a conversation do."""

import pytest

from services.launcher.shell import Conversation, UnknownCommand


def test_parameters_are_set_shown_and_unset() -> None:
    talk = Conversation()
    for line in ("/set temperature 0.2", "/set max_tokens 40", "/set seed 7", "/set stop two words"):
        talk.command(line)
    params = talk.params()
    assert (params.temperature, params.max_tokens, params.seed, talk.stop) == (0.2, 40, 7, "two words")
    assert "temperature 0.2" in talk.command("/show")
    talk.command("/set temperature none")
    talk.command("/set stop none")
    assert talk.params().temperature == 1.0 and talk.stop == ""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/set temperature hot", "no number"),
        ("/set temperature 3", "from 0 to 2"),
        ("/set max_tokens 1.5", "no integer"),
        ("/set colour 1", "no parameter 'colour'"),
        ("/set", "no parameter ''"),
        ("/sing", "no command /sing"),
    ],
)
def test_what_cannot_be_set_is_said(line: str, words: str) -> None:
    talk = Conversation()
    with pytest.raises(UnknownCommand, match=words):
        talk.command(line)
    assert talk == Conversation()


def test_reset_keeps_the_system_message() -> None:
    talk = Conversation()
    talk.command("/system Be brief.")
    talk.messages += [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    talk.command("/reset")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    talk.command("/system")
    assert talk.messages == []


def test_help_names_every_parameter() -> None:
    text = Conversation().command("/help")
    for name in ("temperature", "top_p", "max_tokens", "stop", "/reset", "/set"):
        assert name in text
