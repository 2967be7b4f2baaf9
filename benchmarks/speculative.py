"""Would speculative decoding speed up rollouts on this machine? Drafts by n-gram lookup, on completions of a real task.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/speculative.py

The draft of a step is what followed the latest occurrence of the last n tokens in the prompt and the completion so far
(prompt lookup: Saxena 2023). A deterministic draft is accepted with the probability that the policy gives it
(Leviathan et al. 2023, arXiv:2211.17192), so the share of drafted tokens in completions that were sampled without
drafts is the share that would be accepted. The price is a forward pass over the drafted tokens of all sequences. Gain:
tokens of a pass, divided by its CPU-seconds relative to a pass over one token for each sequence. Other costs of drafts
are left out, so the gain is an upper bound.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from apps.real.records import Extract
from forge import generate
from forge.models import resolve_model

TEMPLATE = "Reply with one JSON object and nothing else.\n{}"


def lookup(context: list[int], drafts: int, longest: int = 3) -> list[int]:
    """The tokens that followed the latest occurrence of the last tokens; empty if there is none."""
    for n in range(longest, 0, -1):
        suffix = context[-n:]
        for start in range(len(context) - n - 1, -1, -1):
            if context[start : start + n] == suffix:
                return context[start + n : start + n + drafts]
    return []


def replay(prompt: list[int], answer: list[int], drafts: int) -> tuple[int, int, int]:
    """Forward passes, tokens in them, and drafted tokens that were accepted, for one completion."""
    passes = computed = accepted = at = 0
    while at < len(answer):
        draft = lookup([*prompt, *answer[:at]], min(drafts, len(answer) - at - 1))
        good = 0
        while good < len(draft) and draft[good] == answer[at + good]:
            good += 1
        passes, computed, accepted, at = passes + 1, computed + 1 + len(draft), accepted + good, at + good + 1
    return passes, computed, accepted


def seconds(model: torch.nn.Module, batch: int, context: int, new: int, repeats: int) -> float:
    """Median CPU-seconds of a pass over `new` tokens for each of `batch` sequences after `context` tokens."""
    taken = []
    with torch.inference_mode():
        past = model(torch.zeros(batch, context, dtype=torch.long), past_key_values=DynamicCache()).past_key_values
        for _ in range(repeats + 1):
            if surplus := past.get_seq_length() - context:
                past.crop(-surplus)
            start = time.process_time()
            model(torch.zeros(batch, new, dtype=torch.long), past_key_values=past)
            taken.append(time.process_time() - start)
    return statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="build/models/SmolLM2-135M-Instruct.Q4_1.gguf", help="`make real` fetches it"
    )
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    questions = [question for question, _ in Extract().take(args.problems, seed=0, difficulty=[2, 3])]
    asked = [TEMPLATE.format(question) for question in questions]
    groups = generate(args.model, asked, chat=True, n=2, max_tokens=40, seed=0)
    done = [(list(c.prompt_ids), list(c.token_ids)) for group in groups for c in group]
    tokens = sum(len(answer) for _, answer in done)
    context = round(statistics.mean(len(prompt) + len(answer) / 2 for prompt, answer in done))
    model = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=torch.float32).eval()
    print(f"{torch.backends.cpu.get_cpu_capability()}, one thread; {len(done)} completions, {tokens} tokens\n")
    one = {batch: seconds(model, batch, context, 1, args.repeats) for batch in args.batches}
    print(
        "| drafted tokens | accepted | tokens of a pass | "
        + " | ".join(f"gain, batch {b}" for b in args.batches)
        + " |"
    )
    print("|---|---|---|" + "---|" * len(args.batches))
    for drafts in args.drafts:
        counts = [replay(prompt, answer, drafts) for prompt, answer in done]
        passes, computed, accepted = (sum(column) for column in zip(*counts, strict=True))
        width, gains = computed / passes, []
        for batch in args.batches:
            # Sequences without a draft compute one token: the price of the mean width.
            full = seconds(model, batch, context, 1 + drafts, args.repeats) / one[batch]
            gains.append(tokens / passes / (1 + (full - 1) * (width - 1) / drafts))
        share = f"{accepted / max(1, computed - passes):.0%}"
        print(
            f"| {drafts} | {share} | {tokens / passes:.2f} | " + " | ".join(f"{g:.2f}" for g in gains) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
