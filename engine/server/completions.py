"""OpenAI's completions, streamed or whole, and the models that there are."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from http import HTTPStatus
from typing import Annotated
from uuid import uuid4

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ..completion import CompletionOutput, RequestOutput
from ..errors import EngineError
from ..outputs import TokenLogprobs
from .delivery import Delivery, Disconnected
from .dependencies import Config, Engine, Handing, Text
from .errors import error_body
from .schemas import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, ModelCard, ModelList, Usage, WeightVersionSpan
from .tokenizer import TextStream, Tokenizer, token_name

router = APIRouter(prefix="/v1", tags=["completions"])

CLIENT_CLOSED_REQUEST = 499
"""What nginx calls it; nobody reads this answer."""

RequestIdHeader = Annotated[str | None, Header(alias="X-Request-Id", pattern=r"^[!-~]+$", max_length=256)]


@router.get("/models")
async def list_models(request: Request, llm: Engine, config: Config) -> ModelList:
    card = ModelCard(
        id=config.served_model_name,
        created=request.app.state.started,
        root=str(llm.config.checkpoint),
        max_model_len=llm.config.max_model_len,
    )
    return ModelList(data=[card])


@router.post(
    "/completions",
    response_model=Completion,
    response_model_exclude_unset=True,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def create_completion(
    body: CompletionRequest, llm: Engine, tokenizer: Text, config: Config, delivery: Handing, x_request_id: RequestIdHeader = None
) -> Completion | Response:
    """Generate from each prompt.

    The requests are called `cmpl-<X-Request-Id>-<prompt index>`. Accepted under a pause, a stream begins at once and its first
    token comes after the resume. A client that hangs up ends its requests.
    """
    if body.model not in (None, config.served_model_name):
        raise HTTPException(HTTPStatus.NOT_FOUND, f"no model {body.model!r}: this server has {config.served_model_name!r}")
    completion_id = f"cmpl-{x_request_id or uuid4().hex}"
    prompts = [await _token_ids(prompt, tokenizer) for prompt in body.prompts()]
    params = [body.sampling_params(room=llm.config.max_model_len - len(prompt)) for prompt in prompts]
    await delivery.submit({f"{completion_id}-{index}": request for index, request in enumerate(zip(prompts, params, strict=True))})
    answer = _Answer(completion_id, body, config.served_model_name, tokenizer, sum(map(len, prompts)))
    if body.stream:
        return StreamingResponse(_events(answer, delivery), media_type="text/event-stream")
    try:
        async with aclosing(delivery.outputs()) as outputs:
            choices = [choice async for index, output in outputs for choice in answer.choices(index, output)]
    except Disconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return answer.completion(sorted(choices, key=lambda choice: choice.index), usage=answer.usage)


async def _token_ids(prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
    """A long text takes a while, which other requests must not feel."""
    return await run_in_threadpool(tokenizer.encode, prompt) if isinstance(prompt, str) else prompt


async def _events(answer: _Answer, delivery: Delivery) -> AsyncIterator[str]:
    """The answer as server-sent events, each with news of one choice; an error that comes too late for a status code is one too."""
    try:
        async with aclosing(delivery.outputs()) as outputs:
            async for index, output in outputs:
                for choice in answer.choices(index, output):
                    yield _event(answer.completion([choice]).model_dump_json(exclude_unset=True))
        if answer.body.stream_options and answer.body.stream_options.include_usage:
            yield _event(answer.completion([], usage=answer.usage).model_dump_json(exclude_unset=True))
    except Disconnected:
        return
    except EngineError as error:
        yield _event(error_body(error).model_dump_json())
    yield _event("[DONE]")


def _event(data: str) -> str:
    return f"data: {data}\n\n"


class _Answer:
    """What has become of one call's outputs so far."""

    def __init__(self, completion_id: str, body: CompletionRequest, model: str, tokenizer: Tokenizer, num_prompt_tokens: int) -> None:
        self.body = body
        self._id = completion_id
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._choices: dict[int, _Choice] = {}

    @property
    def usage(self) -> Usage:
        prompt, output = self._num_prompt_tokens, self._num_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)

    def completion(self, choices: list[CompletionChoice], *, usage: Usage | None = None) -> Completion:
        """What is left unset here, or None where only some answers have it, is left out of the JSON."""
        completion = Completion(id=self._id, object="text_completion", created=self._created, model=self._model, choices=choices)
        if usage is not None:
            completion.usage = usage
        return completion

    def choices(self, prompt_index: int, output: RequestOutput) -> list[CompletionChoice]:
        """News of one prompt's request as choices: of prompt i they are numbered from i * n on."""
        return [self._choice(prompt_index * self.body.n + sequence.index, sequence, output.prompt_token_ids) for sequence in output.outputs]

    def _choice(self, index: int, output: CompletionOutput, prompt_token_ids: list[int]) -> CompletionChoice:
        self._num_tokens += len(output.token_ids)
        known = index in self._choices
        state = self._choices.setdefault(index, _Choice(self._tokenizer.stream()))
        choice = CompletionChoice(
            index=index,
            text=state.text.feed(output.token_ids) + (state.text.end() if output.finish_reason else ""),
            logprobs=None if output.logprobs is None else self._logprobs(state, output.token_ids, output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=None,
        )
        if self.body.return_token_ids:
            choice.token_ids = output.token_ids
            if not known:
                choice.prompt_token_ids = prompt_token_ids
        if output.weight_versions is not None:
            choice.weight_versions = [WeightVersionSpan(**span._asdict()) for span in output.weight_versions]
        return choice

    def _logprobs(self, state: _Choice, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        name = token_name if self.body.return_tokens_as_token_ids else self._tokenizer.name
        result = CompletionLogprobs(text_offset=[], tokens=[], token_logprobs=[], top_logprobs=[])
        for token_id, found in zip(token_ids, logprobs, strict=True):
            result.text_offset.append(state.offset)
            result.tokens.append(name(token_id))
            result.token_logprobs.append(found.chosen)
            # The sampled token is there even if it is not among the best.
            result.top_logprobs.append({name(top): value for top, value in ((token_id, found.chosen), *found.top)})
            state.offset += len(name(token_id))
        return result


class _Choice:
    """How far one choice's text is."""

    def __init__(self, text: TextStream) -> None:
        self.text = text
        self.offset = 0
        """Where the next token's name begins."""
