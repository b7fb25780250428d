"""A request whose prompt is scored: every score once, in order, and before the first token."""

from collections.abc import Sequence

import pytest
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    Cancel,
    DecodeStages,
    FirstToken,
    Granted,
    GrantRequest,
    Prefill,
    PrefillStages,
    PromptScores,
    SampledToken,
    SamplingParams,
    SequenceTokens,
)
from twinpool.router.generation import Finished, GenerationEvent, GenerationRequest, PromptScored, TokensSent
from twinpool.router.lifecycle import Emit, Lifecycle, Phase, RouterCommand, Send

P, D = WorkerId("prompt-0", "p"), WorkerId("completion-0", "d")
PROMPT = (5, 6, 7, 8)
SAMPLING = SamplingParams(max_tokens=2, scores_prompt=True, num_logprobs=1)
STAGES = PrefillStages(queue_s=0.25, prefill_s=1.5, num_computed_tokens=4, num_kv_bytes=300, num_kv_bytes_arrived=200)


def prefilling(lifecycle: Lifecycle | None = None, prompt: tuple[int, ...] = PROMPT) -> Lifecycle:
    lifecycle = lifecycle or Lifecycle(GenerationRequest("r", prompt, SAMPLING), 8, now=0.0, deadline_s=600.0)
    lifecycle.ask(P, D, 1.0)
    lifecycle.granted(
        Granted(request_id="r", attempt=1, generation=7, credit_bytes=1000, num_free_blocks=5), ("tcp://d",), 1.5
    )
    return lifecycle


def scores(start: int, stop: int) -> PromptScores:
    return PromptScores(request_id="r", attempt=1, position=start, tokens=tuple(map(score, range(start, stop))))


def score(index: int) -> SampledToken:
    return SampledToken(token=PROMPT[index], logprob=-float(index))


def first(reason: str | None = None) -> FirstToken:
    return FirstToken(
        request_id="r", attempt=1, position=0, token=SampledToken(token=100), finish_reason=reason, stages=STAGES
    )


def report(reason: str | None = None) -> SequenceTokens:
    """Return the COMPLETION worker's first report: the first token again, and the second."""
    return SequenceTokens(
        request_id="r",
        attempt=1,
        position=0,
        tokens=(SampledToken(token=100), SampledToken(token=101)),
        finish_reason=reason,
        stages=DecodeStages(since_last_kv_s=0.25, prefill=STAGES),
    )


def events(commands: Sequence[RouterCommand]) -> list[GenerationEvent]:
    return [command.event for command in commands if isinstance(command, Emit)]


def test_only_the_prompt_worker_is_asked_for_scores() -> None:
    lifecycle = Lifecycle(GenerationRequest("r", PROMPT, SAMPLING), 8, now=0.0, deadline_s=600.0)
    (ask,) = lifecycle.ask(P, D, 1.0)
    assert isinstance(ask, Send)
    assert isinstance(ask.message, GrantRequest)
    assert ask.message.sampling == SAMPLING.model_copy(update={"scores_prompt": False})
    granted = Granted(request_id="r", attempt=1, generation=7, credit_bytes=1000, num_free_blocks=5)
    (prefill,) = lifecycle.granted(granted, (), 1.5)
    assert isinstance(prefill, Send)
    assert isinstance(prefill.message, Prefill)
    assert prefill.message.sampling == SAMPLING


def test_scores_go_out_once_and_in_order_whatever_comes_twice() -> None:
    lifecycle = prefilling()
    sent = [
        event
        for message in (scores(1, 3), scores(1, 2), scores(2, 4), scores(1, 4))
        for event in events(lifecycle.scored(message, 2.0))
    ]
    assert sent == [PromptScored(1, (score(1), score(2))), PromptScored(3, (score(3),))]
    assert lifecycle.is_scored
    assert events(lifecycle.first_token(first(), 3.0)) == [TokensSent(0, (SampledToken(token=100),))]


def test_a_prompt_of_one_token_has_no_scores_to_wait_for() -> None:
    lifecycle = prefilling(prompt=(5,))
    assert lifecycle.is_scored
    assert not lifecycle.is_gap(first())


def test_scores_that_were_lost_are_seen() -> None:
    """Both come from the PROMPT worker, in order: a first token before the last score means that some are lost."""
    lifecycle = prefilling()
    assert lifecycle.is_gap(scores(2, 4))
    assert lifecycle.is_gap(first())
    lifecycle.scored(scores(1, 3), 2.0)
    assert not lifecycle.is_gap(scores(3, 4))
    assert lifecycle.is_gap(first())
    lifecycle.scored(scores(3, 4), 2.0)
    assert not lifecycle.is_gap(first())


def test_tokens_that_overtake_the_scores_wait_for_the_last_of_them() -> None:
    """The TTFT is when the token went to the client; when the KV had come is when the report says."""
    lifecycle = prefilling()
    assert not lifecycle.is_gap(report())
    assert lifecycle.tokens(report(), 3.0) == []
    further = SequenceTokens(
        request_id="r", attempt=1, position=2, tokens=(SampledToken(token=102),), finish_reason="stop"
    )
    assert not lifecycle.is_gap(further)
    assert lifecycle.is_gap(further.model_copy(update={"position": 3}))
    assert lifecycle.tokens(further, 3.5) == []
    assert lifecycle.depends_on(P), "only it has the scores"
    assert events(lifecycle.scored(scores(1, 3), 3.5)) == [PromptScored(1, (score(1), score(2)))]
    *sent, end = events(lifecycle.scored(scores(3, 4), 4.0))
    assert sent == [
        PromptScored(3, (score(3),)),
        TokensSent(0, report().tokens),
        TokensSent(2, further.tokens),
    ]
    assert isinstance(end, Finished)
    assert (end.timeline.ttft_s, end.timeline.last_kv_s) == (4.0, 3.0 - 0.25 - 4.0)
    assert lifecycle.phase is Phase.ENDED


@pytest.mark.parametrize(
    ("reason", "holders"), [(None, [P, D]), ("length", [P])], ids=["it still decodes", "it has ended"]
)
def test_who_must_hold_it_while_scores_are_missing(reason: str | None, holders: list[WorkerId]) -> None:
    """A COMPLETION worker that has said its last token holds nothing any more; its death would harm nobody."""
    lifecycle = prefilling()
    lifecycle.tokens(report(reason), 3.0)
    assert lifecycle.holders() == holders
    assert lifecycle.depends_on(P)
    assert lifecycle.depends_on(D) == (reason is None)
    cancels = [c.worker for c in lifecycle.stop_workers() if isinstance(c, Send) and isinstance(c.message, Cancel)]
    assert cancels == [P, D]
    lifecycle.scored(scores(1, 4), 4.0)
    assert not lifecycle.depends_on(P)


def test_a_lost_attempt_forgets_the_tokens_that_were_held_and_keeps_the_scores() -> None:
    """The next attempt begins at the prompt, sends all scores again, and each goes out once."""
    lifecycle = prefilling()
    lifecycle.scored(scores(1, 3), 2.0)
    lifecycle.tokens(report("length"), 3.0)
    lifecycle.requeue()
    assert lifecycle.token_ids == PROMPT
    prefilling(lifecycle)
    assert lifecycle.holders() == [P, D]
    assert events(lifecycle.scored(scores(1, 4), 5.0)) == [PromptScored(3, (score(3),))]
    assert events(lifecycle.first_token(first(), 6.0)) == [TokensSent(0, (SampledToken(token=100),))]


def test_an_attempt_after_the_last_score_asks_for_none() -> None:
    lifecycle = prefilling()
    lifecycle.scored(scores(1, 4), 2.0)
    lifecycle.requeue()
    lifecycle.ask(P, D, 3.0)
    granted = Granted(request_id="r", attempt=2, generation=8, credit_bytes=1000, num_free_blocks=5)
    (prefill,) = lifecycle.granted(granted, (), 3.5)
    assert isinstance(prefill, Send)
    assert isinstance(prefill.message, Prefill)
    assert not prefill.message.sampling.scores_prompt
