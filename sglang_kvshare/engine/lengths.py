"""How long answers will be: asked when a request is considered, told when it has ended.

Seams: ``Req.origin_input_ids``, ``output_ids``, ``sampling_params``.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from sglang_kvshare.engine.index_mirror import int64
from sglang_kvshare.scheduling.length_estimate import Asked, LengthEstimator, confidence_at

if TYPE_CHECKING:
    from sglang_kvshare.engine.schedule import Job
    from sglang_kvshare.matching.answered import AnsweredPrompts

logger = logging.getLogger(__name__)

_SAVE_EVERY_MS = 60_000.0


class Lengths:
    """Owner of what was learnt of answers' lengths.

    Args:
        estimator: learns from every answer.
        prompts: answers to similar prompts; ``None`` where prompts are not sketched.
        confidence: of a bound at no load, and how it falls with the arrival rate.
        path: file in which the estimator outlives a restart; ``None``: it does not.
        on_fault: told when similar prompts cannot be asked.
    """

    def __init__(
        self,
        estimator: LengthEstimator,
        prompts: AnsweredPrompts | None,
        confidence: tuple[float, float],
        path: Path | None,
        on_fault: Callable[[str], None],
    ) -> None:
        self.estimator = estimator
        self._prompts = prompts
        self._confidence = confidence
        self._path = path
        self._on_fault = on_fault
        self._saved_ms: float | None = None
        self._writer: threading.Thread | None = None
        self._answers = self._saved_answers = 0

    def left_tokens(
        self, req: Any, job: Job, arrivals_per_s: float, lookahead_steps: int = 0
    ) -> int:
        """Upper bound of the tokens that are still to come, with the confidence of the hour.

        At least 1: a step writes one before it is known whether it was the last.

        Args:
            lookahead_steps: an answer that comes so near its bound is taken to outgrow it, and is
                asked about anew.
        """
        most, so_far = req.sampling_params.max_new_tokens, len(req.output_ids)
        if req.sampling_params.ignore_eos:
            return max(1, most - so_far)
        upper = self._upper_tokens(req, job, so_far, arrivals_per_s, lookahead_steps)
        return max(1, min(upper, most) - so_far)

    def expected_left_tokens(self, req: Any, job: Job) -> int:
        """Tokens that are expected to come, not padded; at least 1."""
        most, so_far = req.sampling_params.max_new_tokens, len(req.output_ids)
        if req.sampling_params.ignore_eos or job.estimate is None:
            return max(1, most - so_far)
        predicted = job.estimate.predicted_tokens
        if so_far >= predicted:
            assert job.asked is not None
            predicted = self.estimator.longer(job.asked, so_far, 0.5)
        return max(1, min(predicted, most) - so_far)

    def _upper_tokens(
        self, req: Any, job: Job, so_far: int, arrivals_per_s: float, lookahead_steps: int
    ) -> int:
        confidence = confidence_at(arrivals_per_s, *self._confidence)
        if job.asked is None:
            job.asked = self._asked(req, job)
        if job.estimate is None:
            job.estimate = self.estimator.estimate(job.asked, confidence)
        upper = job.estimate.upper_tokens
        if so_far and so_far + lookahead_steps >= upper:
            return max(upper, self.estimator.longer(job.asked, so_far, confidence))
        return upper

    def _asked(self, req: Any, job: Job) -> Asked:
        neighbours: tuple[int, ...] = ()
        if self._prompts is not None:
            try:
                neighbours = self._prompts.neighbours(
                    job.waiting.namespace, int64(req.origin_input_ids)
                )
            except Exception:
                self._give_up_prompts()
        return Asked(
            namespace=job.waiting.namespace.hex(),
            prompt_tokens=len(req.origin_input_ids),
            max_new_tokens=max(1, req.sampling_params.max_new_tokens),
            neighbours=neighbours,
        )

    def answered(self, req: Any, job: Job, tenant: str | None) -> None:
        """``req`` of ``tenant`` ended by itself or at its bound."""
        if job.asked is None or job.estimate is None:
            return
        tokens = len(req.output_ids)
        self.estimator.observe(job.asked, job.estimate, tokens)
        self._answers += 1
        if self._prompts is not None:
            try:
                self._prompts.add(
                    job.waiting.namespace, int64(req.origin_input_ids), tokens, tenant
                )
            except Exception:
                self._give_up_prompts()

    def forget(self, tenant: str, namespaces: set[bytes]) -> None:
        """Nothing of ``tenant``, nor of ``namespaces``, is remembered any more."""
        if self._prompts is not None:
            namespaces = namespaces | self._prompts.forget(tenant)
        self.estimator.forget({namespace.hex() for namespace in namespaces})
        if self._path is not None:
            # What was about to be written must not come after it.
            self.wait()
            self._write(self._path, self.estimator.to_state())

    def _give_up_prompts(self) -> None:
        logger.exception("KVShare asks similar prompts no more how long their answers were")
        self._prompts = None
        self._on_fault("lengths")

    # --- the file -----------------------------------------------------------------------------

    def save_when_due(self, now_ms: float) -> None:
        """Once a minute, where anything was learnt; a failure is logged once and ends it."""
        if self._path is None or self._answers == self._saved_answers:
            return
        if self._saved_ms is not None and now_ms - self._saved_ms < _SAVE_EVERY_MS:
            return
        self._saved_ms, self._saved_answers = now_ms, self._answers
        if self._writer is not None and self._writer.is_alive():
            return
        # Not in the scheduler's time.
        self._writer = threading.Thread(
            target=self._write, args=(self._path, self.estimator.to_state()), daemon=True
        )
        self._writer.start()

    def wait(self) -> None:
        """Until the file is written that is being written."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        try:
            fresh = path.with_name(path.name + ".new")
            # Fast: whoever serialises keeps the interpreter's lock.
            fresh.write_bytes(orjson.dumps(state))
            os.replace(fresh, path)
        except OSError as error:
            logger.warning("KVShare cannot write length_file=%s: %s", path, error.strerror)
            self._path = None


def read_estimator(path: Path | None, *, isolated: bool) -> LengthEstimator:
    """What a file holds, or a new one: a file that is not there or cannot be read costs what it
    knew and no more."""
    if path is not None and path.exists():
        try:
            return LengthEstimator.from_state(orjson.loads(path.read_bytes()), isolated=isolated)
        except (OSError, ValueError) as error:
            logger.warning("KVShare begins anew with answers' lengths: %s: %s", path, error)
    return LengthEstimator(isolated=isolated)
