"""What a quality task is made of: prompts, cases, and groups of cases that share a cache.

    group    history: earlier requests      cases: the questions that are measured
             [prompt] [prompt] ...     ->   [case] [case] ...
             put the donors there           each asked once with every method

A group is served in a namespace of its own (a cache salt), so that groups cannot help each other
and a run can be resumed at any of them. Cases of one group share passages and donors: they are not
independent, and every interval is taken over groups, not over cases.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """One message of a chat; ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True)
class Prompt:
    """What one request says: a chat, rendered with the model's own template, or plain text.

    Exactly one of the two is given. Plain text goes to the model as it stands, with no template: it
    is for donors that are encoded alone.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.text):
            raise ValueError("a prompt has either messages or text")


def user(content: str, *, system: str = "") -> Prompt:
    """A chat of one user message, behind a system message if one is given."""
    head = (Message("system", system),) if system else ()
    return Prompt((*head, Message("user", content)))


@dataclass(frozen=True)
class Case:
    """One measured question.

    Attributes:
        id: unique within its group.
        prompt: the question with its context.
        answers: accepted answers, the best of them counts; empty where there is no gold.
        no_context: the same question without the context, the floor of ``PGR``; ``None`` where the
            task has no such thing.
    """

    id: str
    prompt: Prompt
    answers: tuple[str, ...] = ()
    no_context: Prompt | None = None


@dataclass(frozen=True)
class Group:
    """Cases that share donors.

    Attributes:
        id: unique within the task, the same in every run with the same data, options and seed.
        history: requests that came before, in this order; their KV is what can be reused.
        cases: what is measured.
    """

    id: str
    history: tuple[Prompt, ...]
    cases: tuple[Case, ...]
