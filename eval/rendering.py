"""From prompts to token ids, with the model's own tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvshare_eval.errors import EvalError
from kvshare_eval.quality.cases import Prompt


@dataclass(frozen=True)
class Renderer:
    """Renders prompts for one model; the server is sent token ids, so that nothing is added there.

    Attributes:
        tokenizer: of the ``transformers`` package.
    """

    tokenizer: Any

    def ids(self, prompt: Prompt) -> list[int]:
        """The prompt's tokens; a chat ends where the assistant is to speak."""
        if prompt.text:
            return list(self.tokenizer.encode(prompt.text, add_special_tokens=False))
        messages = [{"role": each.role, "content": each.content} for each in prompt.messages]
        if not getattr(self.tokenizer, "chat_template", None):
            plain = "".join(f"{each['role']}: {each['content']}\n\n" for each in messages)
            return list(self.tokenizer.encode(plain + "assistant:"))
        from jinja2 import TemplateError

        try:
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            roles = ", ".join(each.role for each in prompt.messages)
            raise EvalError(
                f"the model's chat template refuses messages of {roles}: {error}"
            ) from None
        return list(ids)


def load_renderer(name: str) -> Renderer:
    """The renderer of a model's folder or hub name.

    Raises:
        EvalError: there is no tokenizer of that name.
    """
    from transformers import AutoTokenizer

    try:
        return Renderer(AutoTokenizer.from_pretrained(name))
    except (ImportError, OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise EvalError(f"no tokenizer at {name!r} (give one with --tokenizer): {first}") from None
