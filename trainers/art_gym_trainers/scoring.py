"""Scoring: log-probabilities and entropies of chosen tokens of many sequences, with every token of their tree computed once.

`add_scoring` teaches a model to take a `TreeBatch`. The linear layers see each token of the tree once and no padding; attention follows the
tree (`art_gym_trainers.tree_attention`); the head, the widest layer of a small model, sees only the states that predict a scored token, some
at a time (`head_rows`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from art_gym.errors import UsageError
from art_gym_trainers import tree_attention
from art_gym_trainers.tree_attention import TreeLayout
from art_gym_trainers.trees import TokenTree

_log = logging.getLogger(__name__)

_TOLERANCE = {64: 1e-4, 32: 1e-3, 16: 0.1}
"""Mean difference of log-probabilities that rounding explains, by bits of the dtype; attention to a wrong token gives several times more."""


def head_rows(device: torch.device) -> int:
    """Most scored tokens whose logits are held at once; in float32 each takes four bytes for every word of the vocabulary."""
    # On a CPU so few that the allocator keeps their memory: pages asked for anew cost as much as what is computed in them.
    return 128 if device.type == "cpu" else 512


@dataclass(frozen=True, slots=True)
class TreeBatch:
    """A token tree on a device, and which of its tokens are scored.

    Attributes:
        input_ids: (1, N) the tree's tokens.
        position_ids: (1, N) their positions in their sequences.
        layout: What attention needs of the tree.
        predictors: (S,) for each different token that is scored, the index of the token before it.
        targets: (S,) the ids of the scored tokens.
        picks: (M,) for each scored token of the sequences, row by row, which of the S it is.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: TreeLayout
    predictors: torch.Tensor
    targets: torch.Tensor
    picks: torch.Tensor

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]], device: torch.device | str = "cpu") -> TreeBatch:
        """Lay sequences out as a tree.

        Args:
            sequences: Token ids.
            scored: Which of them are scored, equally long; never a sequence's first.
            device: Where the tensors go.
        """
        _check_scored(scored)
        tree = TokenTree.build(sequences)
        places = [place for path, flags in zip(tree.paths, scored, strict=True) for place, flag in zip(path, flags, strict=True) if flag]
        different = sorted(set(places))
        rank = {place: index for index, place in enumerate(different)}

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        return cls(
            input_ids=tensor(tree.token_ids)[None],
            position_ids=tensor(tree.positions)[None],
            layout=TreeLayout(tree, device),
            predictors=tensor([tree.parents[place] for place in different]),
            targets=tensor([tree.token_ids[place] for place in different]),
            picks=tensor([rank[place] for place in places]),
        )


def _check_scored(scored: Sequence[Sequence[bool]]) -> None:
    if any(flags and flags[0] for flags in scored):
        raise ValueError("a sequence's first token can't be scored: nothing comes before it")


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Rows padded on the right, for models whose attention can't follow a tree; fields as in `TreeBatch`, for B rows of at most L tokens.

    Attributes:
        input_ids: (B, L); a causal model doesn't see the padding on the right, so that no mask is needed.
        predictors: (M,) index into the B * L states of the one before each scored token, row by row.
        targets: (M,) the ids of the scored tokens.
    """

    input_ids: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int]], scored: Sequence[Sequence[bool]], device: torch.device | str = "cpu") -> PaddedBatch:
        """Pad sequences; the arguments are those of `TreeBatch.build`."""
        _check_scored(scored)
        width = max(map(len, sequences))
        places = [(row, place) for row, flags in enumerate(scored) for place, flag in enumerate(flags) if flag]
        return cls(
            input_ids=torch.tensor([[*sequence, *[0] * (width - len(sequence))] for sequence in sequences], device=device),
            predictors=torch.tensor([row * width + place - 1 for row, place in places], dtype=torch.long, device=device),
            targets=torch.tensor([sequences[row][place] for row, place in places], dtype=torch.long, device=device),
        )


def add_scoring(model: PreTrainedModel) -> type[TreeBatch] | type[PaddedBatch]:
    """Teach `model` to score: `model(batch=…, temperature=1.0, entropy_gradients=False)` returns two float32 tensors (M,).

    For each scored token, row by row, its log-probability, and the entropy in nats of the distribution that it was drawn from, both after
    dividing the logits by `temperature`. Entropies carry no gradient unless they are asked to. Called in any other way the model does what it
    did.

    Whether the model's attention can follow a tree is found out by trying: two short sequences are scored as a tree, and by the model's own
    logits. If the two differ, or it can't be done at all, rows are padded instead, and a warning says why. A model that does more to its
    logits than its head does (scales them, say) computes them itself, all at once.

    Returns:
        What to build batches with, which both kinds do alike.

    Raises:
        UsageError: Not even padded rows are scored as by the model's own logits.
    """
    if not hasattr(model, "_art_gym_batch"):
        _take_batches(model)
        before = model.config._attn_implementation
        trial = _Trial(model)
        model._art_gym_own_logits = trial.problem_of(PaddedBatch) is not None
        if model._art_gym_own_logits and (problem := trial.problem_of(PaddedBatch)):
            raise UsageError(f"{type(model).__name__} can't be trained on: it {problem}; take another model")
        problem = _no_tree(model)
        if problem is None:
            try:
                model.set_attn_implementation(tree_attention.NAME)
                problem = trial.problem_of(TreeBatch)
            except Exception as error:  # noqa: BLE001  a model's own code may raise anything
                problem = f"takes no other attention ({type(error).__name__})"
        if problem is not None:
            with contextlib.suppress(Exception):  # what wasn't set can't be set back
                model.set_attn_implementation(before)
            _log.warning("tokens that sequences share are computed once for each: %s %s", type(model).__name__, problem)
        model._art_gym_batch = TreeBatch if problem is None else PaddedBatch
    batch: type[TreeBatch] | type[PaddedBatch] = model._art_gym_batch
    return batch


def _take_batches(model: PreTrainedModel) -> None:
    original_forward = model._art_gym_forward = model.forward
    model._art_gym_own_logits = False

    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel,
        *args: Any,
        batch: TreeBatch | PaddedBatch | None = None,
        temperature: float = 1.0,
        entropy_gradients: bool = False,
        **kwargs: Any,
    ) -> Any:
        if batch is None:
            return original_forward(*args, **kwargs)
        # What a wrapper around the model adds (PEFT passes all that a model could be given) is left out.
        inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
        if isinstance(batch, TreeBatch):
            inputs |= {
                "position_ids": batch.position_ids,
                # A mask of four dimensions is taken as it is; the layout says what is seen.
                "attention_mask": batch.input_ids.new_empty(1, 1, 1, 1),
                "layout": batch.layout,
            }
        if self._art_gym_own_logits:
            logits = original_forward(**inputs).logits.flatten(0, 1)[batch.predictors]
            logprobs, entropies = _from_logits(logits, batch.targets, temperature, entropy_gradients)
        else:
            states = self.base_model(**inputs).last_hidden_state.flatten(0, 1)[batch.predictors]
            cap = getattr(self.config.get_text_config(), "final_logit_softcapping", None)
            head = self.get_output_embeddings()
            logprobs, entropies = score_states(head, states, batch.targets, temperature, cap, entropy_gradients=entropy_gradients)
        return (logprobs[batch.picks], entropies[batch.picks]) if isinstance(batch, TreeBatch) else (logprobs, entropies)

    model.forward = types.MethodType(forward, model)


def _no_tree(model: PreTrainedModel) -> str | None:
    """Say what no short trial would show."""
    if getattr(model.config.get_text_config(), "attention_chunk_size", None):
        return "attends by chunks of positions, which a token tree has not"
    return None


def longest_row(model: torch.nn.Module) -> int | None:
    """Most tokens of a row that is scored alike whatever else its pass holds; None if any row is.

    Two kinds of rotary embedding, "dynamic" and "longrope", turn all of a pass otherwise once its longest row is longer than what the model was
    first trained for.
    """
    limits: list[int] = []
    modules: Iterable[Any] = model.modules()
    for module in modules:
        kinds = getattr(module, "rope_type", None)
        for layer, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "longrope":
                settings = module.config.rope_parameters
                limits.append((settings if layer is None else settings[layer])["original_max_position_embeddings"])
            elif isinstance(kind, str) and "dynamic" in kind:
                limits.append(module.original_max_seq_len)
    return min(limits, default=None)


def _windowed_layers(model: PreTrainedModel) -> int:
    """How many layers attend within a sliding window, by the model's configuration."""
    config = model.config.get_text_config()
    if not getattr(config, "sliding_window", None) or getattr(config, "use_sliding_window", True) is False:
        return 0
    layers = getattr(config, "layer_types", None)
    return int(config.num_hidden_layers) if layers is None else list(layers).count("sliding_attention")


class _Trial:
    """Two short sequences that share their beginning, and how the model's own logits score them."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        size = min(model.get_input_embeddings().num_embeddings, 256)
        # Any ids will do; these are spread over the vocabulary.
        shared, left, right = ([(start + 37 * place) % size for place in range(12)] for start in (1, 5, 11))
        self.sequences, self.scored = [shared + left, shared + right], [[False] + [True] * 23] * 2
        self.device = model.get_input_embeddings().weight.device
        quantised = getattr(model, "quantization_method", None) is not None
        self.tolerance = _TOLERANCE[16 if quantised else torch.finfo(model.dtype).bits]
        self.expected = self._own_scores()

    def problem_of(self, kind: type[TreeBatch] | type[PaddedBatch]) -> str | None:
        """Score the sequences, forward and backward, as in training and not; say what is wrong, if anything is."""
        model, training = self.model, self.model.training
        try:
            # Dropout draws random numbers, and a trial must not move what a run draws later.
            with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []), torch.enable_grad():
                batch = kind.build(self.sequences, self.scored, self.device)
                for mode in (True, False):
                    model.train(mode)
                    scores = model(batch=batch)[0]
                    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
                    if trained:
                        torch.autograd.grad(scores.sum(), trained, allow_unused=True)
        except Exception as error:  # noqa: BLE001  a model's own code may raise anything
            return f"can't take them ({type(error).__name__}: {error})".splitlines()[0][:300]
        finally:
            model.train(training)
        if isinstance(batch, TreeBatch) and len(batch.layout.windowed) < _windowed_layers(model):
            # Too wide for two short sequences to show it.
            return "applies its sliding window by a mask of its own, which a token tree has not"
        differences = (scores.detach() - self.expected).abs()
        # What is shared, each branch, and the first tokens of each, where what is confused with the other branch shows most.
        places = (slice(0, 11), slice(11, 14), slice(11, 23), slice(34, 37), slice(34, 46))
        worst = max(float(differences[place].mean()) for place in places)
        if not worst <= self.tolerance:
            return f"scores them otherwise than its own logits do (log-probabilities differ by {worst:.2g})"
        return None

    @torch.no_grad()
    def _own_scores(self) -> torch.Tensor:
        model, training = self.model, self.model.training
        model.eval()
        scores = []
        for ids in self.sequences:
            logits = model._art_gym_forward(input_ids=torch.tensor([ids], device=self.device), use_cache=False).logits[0, :-1].float()
            scores.append(torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:], device=self.device)[:, None])[:, 0])
        model.train(training)
        return torch.cat(scores)


def score_states(
    head: torch.nn.Module,
    states: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    cap: float | None = None,
    *,
    entropy_gradients: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies (S,), float32, of the targets (S,) from the states (S, H) that predict them.

    Args:
        head: The linear layer onto the vocabulary.
        states: Hidden states of the last layer.
        targets: Ids.
        temperature: Divides the logits.
        cap: Gemma 2's `final_logit_softcapping`: logits are `cap * tanh(logits / cap)`.
        entropy_gradients: Whether entropies carry a gradient.
    """
    weight = getattr(head, "weight", None)
    plain = type(head) is torch.nn.Linear and head.bias is None and cap is None and weight is not None and not weight.requires_grad
    plain = plain and not entropy_gradients
    logprobs, entropies = [], []
    size = head_rows(states.device)
    for rows, ids in zip(states.split(size), targets.split(size), strict=True):
        if plain:
            scored = _FrozenHead.apply(rows, weight, ids, temperature)
        elif len(states) > size and torch.is_grad_enabled():
            scored = checkpoint(_score, head, rows, ids, temperature, cap, entropy_gradients, use_reentrant=False)
        else:
            scored = _score(head, rows, ids, temperature, cap, entropy_gradients)
        logprobs.append(scored[0])
        entropies.append(scored[1])
    if not logprobs:
        return states.new_zeros(0, dtype=torch.float32), states.new_zeros(0, dtype=torch.float32)
    return torch.cat(logprobs), torch.cat(entropies)


def _score(
    head: torch.nn.Module, states: torch.Tensor, targets: torch.Tensor, temperature: float, cap: float | None, entropy_gradients: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(states).float()
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return _from_logits(logits, targets, temperature, entropy_gradients)


def _from_logits(logits: torch.Tensor, targets: torch.Tensor, temperature: float, entropy_gradients: bool) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.float() / temperature
    log_normaliser = torch.logsumexp(logits, -1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_normaliser
    with torch.set_grad_enabled(entropy_gradients and torch.is_grad_enabled()):
        entropies = log_normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
    return logprobs, entropies


class _FrozenHead(torch.autograd.Function):
    """`_score` for a head that isn't trained: the gradient of a log-probability is worked out while its logits are there, and they aren't kept.

    d log p(t) / d state = (onehot(t) - p) W / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Two arrays of logits' size, each written over: to allocate one costs as much as to compute it.
        logits = (states @ weight.t()).float()
        if temperature != 1:
            logits /= temperature
        logits -= logits.amax(-1, keepdim=True)
        probabilities = logits.exp()
        total = probabilities.sum(-1)
        log_total = total.log()
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_total
        entropies = log_total - torch.linalg.vecdot(probabilities, logits) / total
        ctx.mark_non_differentiable(entropies)
        if ctx.needs_input_grad[0]:
            probabilities /= -total[:, None]
            probabilities.scatter_add_(-1, targets[:, None], torch.ones_like(targets, dtype=torch.float32)[:, None])
            # In float32 until it is multiplied by the incoming gradient.
            ctx.save_for_backward((probabilities.to(weight.dtype) @ weight).float() / temperature)
        ctx.dtype = states.dtype
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return (slope * grad[:, None]).to(ctx.dtype), None, None, None
