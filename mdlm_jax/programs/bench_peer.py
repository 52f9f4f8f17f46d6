"""The other side of `bench decode`: transformers on torch, from the extra `peers`.

The only file that imports torch. Its loop over blocks is written as the public engines write it:
eager, one forward pass after the other, the batch waiting for its slowest row.
"""

import warnings

import numpy as np
import torch
from ml_collections import ConfigDict
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

# The name is the one that all versions know.
warnings.filterwarnings("ignore", message="`past_key_values` is deprecated")
logging.disable_progress_bar()


class Peer:
    """One checkpoint in torch. Both ways give tokens i64[B, tokens] and the forward passes."""

    def __init__(self, folder: str):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def autoregressive(self, prompt_BL: np.ndarray, plan: ConfigDict, mask_id: int) -> tuple:
        """transformers' own `generate`, greedy."""
        del mask_id
        ids_BL = torch.from_numpy(prompt_BL).long()
        whole = self._model.generate(
            ids_BL,
            attention_mask=torch.ones_like(ids_BL),
            max_new_tokens=plan.tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return whole[:, prompt_BL.shape[1] :].numpy(), plan.tokens

    @torch.inference_mode()
    def block(self, prompt_BL: np.ndarray, plan: ConfigDict, mask_id: int) -> tuple:
        """Blocks of masks behind a prompt of whole blocks, low_confidence_dynamic."""
        ids_BL = torch.from_numpy(prompt_BL).long()
        cache, length = DynamicCache(), ids_BL.shape[1]
        place_L = torch.arange(length) // plan.block
        self._forward(ids_BL, cache, 0, place_L[:, None] >= place_L[None, :])
        blocks, forwards = [], 0
        for start in range(length, length + plan.tokens, plan.block):
            ids_Bb, passes = self._one_block(len(ids_BL), start, cache, plan, mask_id)
            blocks.append(ids_Bb)
            forwards += passes
        return torch.cat(blocks, 1).numpy(), forwards

    def _one_block(self, rows: int, start: int, cache, plan: ConfigDict, mask_id: int):
        ids_Bb = torch.full((rows, plan.block), mask_id)
        sight = torch.ones(plan.block, start + plan.block, dtype=torch.bool)
        passes = 0
        while (masked_Bb := ids_Bb == mask_id).any():
            logits_BbV = self._forward(ids_Bb, cache, start, sight)
            cache.crop(-plan.block)  # what was looked at is not kept
            picked_Bb, best_Bb = _picked(logits_BbV, masked_Bb, plan.threshold)
            ids_Bb = torch.where(picked_Bb, best_Bb, ids_Bb)
            passes += 1
        self._forward(ids_Bb, cache, start, sight)
        return ids_Bb, passes + 1

    def _forward(self, ids_BW, cache, start: int, sight_WC):
        places_1W = torch.arange(start, start + ids_BW.shape[1])[None]
        return self._model(
            ids_BW,
            attention_mask=sight_WC[None, None].expand(len(ids_BW), 1, -1, -1),
            position_ids=places_1W,
            past_key_values=cache,
        ).logits


def _picked(logits_BbV, masked_Bb, threshold: float):
    """Masked tokens above the threshold, or the best one of a row that has none."""
    confidence_Bb, best_Bb = torch.softmax(logits_BbV.float(), -1).max(-1)
    confidence_Bb = torch.where(masked_Bb, confidence_Bb, -1.0)
    sure_Bb = confidence_Bb > threshold
    first_Bb = torch.nn.functional.one_hot(confidence_Bb.argmax(1), masked_Bb.shape[1]).bool()
    lacking_B1 = ~sure_Bb.any(1, keepdim=True)
    return torch.where(lacking_B1, first_Bb, sure_Bb) & masked_Bb, best_Bb
