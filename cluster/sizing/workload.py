"""What arrives: a request as the simulator sees it. Times are seconds from the start of the run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int  # the planner's policies never look at it before it was produced
    prefix_hashes: tuple[int, ...] = ()  # one a block of the prompt; two requests share what leads both tuples
