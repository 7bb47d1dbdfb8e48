//! Continuous batching: many prompts share a few KV-cache slots, and when one sequence ends, the next prompt takes its
//! slot.

use lockstep_engine::{DecodeBatch, DecodeDriver};

use super::sample::{Sampler, SamplingParams};

/// The completion of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// The generated tokens, without the EOS token.
    pub tokens: Vec<u32>,
    /// The log-probability of each generated token, including the EOS token, at temperature 1.
    pub log_probs: Vec<f32>,
    pub end: FinishReason,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model generated an EOS token.
    EndToken,
    /// The completion reached its maximum length.
    Length,
    /// The callback stopped it.
    Stopped,
}

/// A generated token.
#[derive(Clone, Copy, Debug)]
pub struct SampledToken {
    /// The prompt's index.
    pub prompt: usize,
    pub token: u32,
    pub log_prob: f32,
}

/// Called with every token. Returns whether to continue its sequence.
pub type TokenCallback<'a> = dyn FnMut(SampledToken) -> bool + 'a;

/// Limits on the sequences and on one pass.
#[derive(Clone, Debug)]
pub(super) struct DecodeLimits {
    pub(super) slots: usize,
    /// New tokens in one pass.
    pub(super) pass_tokens: usize,
    /// Tokens of a sequence, including its prompt.
    pub(super) capacity: usize,
    pub(super) max_new_tokens: usize,
    pub(super) end_ids: Vec<u32>,
}

/// A sequence in a slot.
#[derive(Debug)]
struct ActiveSequence {
    prompt: usize,
    slot: u32,
    /// The prompt and the generated tokens.
    tokens: Vec<u32>,
    /// Tokens in the cache, including those of the current pass.
    cached: usize,
    prompt_len: usize,
    log_probs: Vec<f32>,
    /// Whether the current pass includes all its tokens, so that the next one can be sampled.
    samples: bool,
}

/// Generates the completions of all prompts.
pub(super) struct Batcher<'a> {
    prompts: &'a [Vec<u32>],
    limits: DecodeLimits,
    sampler: Sampler,
    on_token: &'a mut TokenCallback<'a>,
    waiting: std::ops::Range<usize>,
    free_slots: Vec<u32>,
    active: Vec<ActiveSequence>,
    /// Indices of the active sequences with tokens in the current pass.
    in_pass: Vec<usize>,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    cu_seqlens: Vec<u32>,
    slots: Vec<u32>,
    pub(super) done: Vec<Option<Completion>>,
}

impl<'a> Batcher<'a> {
    pub(super) fn new(
        prompts: &'a [Vec<u32>],
        limits: DecodeLimits,
        sampling: SamplingParams,
        on_token: &'a mut TokenCallback<'a>,
    ) -> Batcher<'a> {
        Batcher {
            prompts,
            sampler: Sampler::new(sampling),
            on_token,
            waiting: 0..prompts.len(),
            free_slots: (0..limits.slots as u32).rev().collect(),
            active: Vec::new(),
            in_pass: Vec::new(),
            tokens: Vec::new(),
            positions: Vec::new(),
            cu_seqlens: Vec::new(),
            slots: Vec::new(),
            done: vec![None; prompts.len()],
            limits,
        }
    }

    /// Assigns waiting prompts to free slots.
    fn admit(&mut self) {
        while let Some(slot) = self.free_slots.pop() {
            let Some(prompt) = self.waiting.next() else {
                self.free_slots.push(slot);
                return;
            };
            let tokens = self.prompts[prompt].clone();
            let (prompt_len, log_probs) = (tokens.len(), Vec::new());
            self.active.push(ActiveSequence {
                prompt,
                slot,
                tokens,
                cached: 0,
                prompt_len,
                log_probs,
                samples: false,
            });
        }
    }

    /// Fills the pass with as many tokens of each active sequence as fit. Sequences with the fewest new tokens come
    /// first, so that a long prompt does not delay those that decode one token.
    fn fill(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.cu_seqlens.clear();
        self.cu_seqlens.push(0);
        self.in_pass.clear();
        let mut order: Vec<usize> = (0..self.active.len()).collect();
        order.sort_by_key(|i| self.active[*i].tokens.len() - self.active[*i].cached);
        for i in order {
            let sequence = &mut self.active[i];
            let space = self.limits.pass_tokens - self.tokens.len();
            let new = sequence.cached..(sequence.cached + space).min(sequence.tokens.len());
            sequence.samples = false;
            if new.is_empty() {
                continue;
            }
            self.tokens.extend_from_slice(&sequence.tokens[new.clone()]);
            self.positions.extend(new.start as u32..new.end as u32);
            self.cu_seqlens.push(self.tokens.len() as u32);
            self.slots.push(sequence.slot);
            sequence.cached = new.end;
            sequence.samples = new.end == sequence.tokens.len();
            self.in_pass.push(i);
        }
    }

    fn finish_reason(&self, sequence: &ActiveSequence, token: u32, continues: bool) -> Option<FinishReason> {
        let new = sequence.tokens.len() - sequence.prompt_len;
        if self.limits.end_ids.contains(&token) {
            Some(FinishReason::EndToken)
        } else if !continues {
            Some(FinishReason::Stopped)
        } else if new >= self.limits.max_new_tokens || sequence.tokens.len() >= self.limits.capacity {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

impl DecodeDriver for Batcher<'_> {
    fn next_batch(&mut self) -> Option<DecodeBatch<'_>> {
        self.admit();
        if self.active.is_empty() {
            return None;
        }
        self.fill();
        let Batcher { tokens, positions, cu_seqlens, slots, .. } = self;
        Some(DecodeBatch { tokens, positions, cu_seqlens, slots })
    }

    fn sample(&mut self, doc: usize, logits: &[f32]) -> u32 {
        let sequence = &mut self.active[self.in_pass[doc]];
        if !sequence.samples {
            // The rest of the prompt follows in a later pass, so these logits are not used.
            return 0;
        }
        let token = self.sampler.sample(logits, &sequence.tokens, sequence.prompt as u32);
        sequence.tokens.push(token);
        token
    }

    fn sampled(&mut self, log_probs: &[f32]) {
        let mut ended: Vec<(usize, FinishReason)> = Vec::new();
        for (i, log_prob) in self.in_pass.iter().zip(log_probs) {
            let sequence = &mut self.active[*i];
            if !sequence.samples {
                continue;
            }
            sequence.log_probs.push(*log_prob);
            let token = sequence.tokens[sequence.tokens.len() - 1];
            let is_end = self.limits.end_ids.contains(&token);
            let sampled = SampledToken { prompt: sequence.prompt, token, log_prob: *log_prob };
            let continues = is_end || (self.on_token)(sampled);
            if let Some(end) = self.finish_reason(&self.active[*i], token, continues) {
                ended.push((*i, end));
            }
        }
        // Remove from the back, so that `swap_remove` does not move sequences that are still to be removed.
        ended.sort_unstable_by_key(|(i, _)| std::cmp::Reverse(*i));
        for (i, end) in ended {
            let mut sequence = self.active.swap_remove(i);
            if end == FinishReason::EndToken {
                sequence.tokens.pop();
            }
            self.free_slots.push(sequence.slot);
            let tokens = sequence.tokens.split_off(sequence.prompt_len);
            self.done[sequence.prompt] = Some(Completion { tokens, log_probs: sequence.log_probs, end });
        }
    }
}
