//! Many prompts through a few slots: as one document ends, the next prompt takes its place.

use lockstep_engine::{DecodeBatch, DecodeDriver};

use super::sample::{Sampler, Sampling};

/// What a prompt became.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// Without the end token.
    pub tokens: Vec<u32>,
    /// Of each token that was drawn, the end token included, at temperature 1.
    pub log_probs: Vec<f32>,
    pub end: End,
}

/// Why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model drew an end token.
    EndToken,
    /// It has as many tokens as it may.
    Length,
    /// The listener wanted no more.
    Stopped,
}

/// A token as it is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Drawn {
    /// The prompt's index.
    pub prompt: usize,
    pub token: u32,
    pub log_prob: f32,
}

/// Hears every token, and says whether its document goes on.
pub type Listener<'a> = dyn FnMut(Drawn) -> bool + 'a;

/// How far documents may grow.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) slots: usize,
    /// New tokens in one pass.
    pub(super) pass_tokens: usize,
    /// Tokens of a document, its prompt included.
    pub(super) capacity: usize,
    pub(super) max_new_tokens: usize,
    pub(super) end_ids: Vec<u32>,
}

/// A document in a slot.
#[derive(Debug)]
struct Running {
    prompt: usize,
    slot: u32,
    /// The prompt and what was drawn.
    tokens: Vec<u32>,
    /// Tokens in the cache, those of the pass that runs included.
    cached: usize,
    prompt_len: usize,
    log_probs: Vec<f32>,
    /// Whether all its tokens are in the pass, so that the next one can be drawn.
    draws: bool,
}

/// Grows all prompts to their ends.
pub(super) struct Batcher<'a> {
    prompts: &'a [Vec<u32>],
    limits: Limits,
    sampler: Sampler,
    listener: &'a mut Listener<'a>,
    waiting: std::ops::Range<usize>,
    free: Vec<u32>,
    running: Vec<Running>,
    /// Indices of running documents that have tokens in the pass.
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
        limits: Limits,
        sampling: Sampling,
        listener: &'a mut Listener<'a>,
    ) -> Batcher<'a> {
        Batcher {
            prompts,
            sampler: Sampler::new(sampling),
            listener,
            waiting: 0..prompts.len(),
            free: (0..limits.slots as u32).rev().collect(),
            running: Vec::new(),
            in_pass: Vec::new(),
            tokens: Vec::new(),
            positions: Vec::new(),
            cu_seqlens: Vec::new(),
            slots: Vec::new(),
            done: vec![None; prompts.len()],
            limits,
        }
    }

    /// Prompts take free slots.
    fn admit(&mut self) {
        while let Some(slot) = self.free.pop() {
            let Some(prompt) = self.waiting.next() else {
                self.free.push(slot);
                return;
            };
            let tokens = self.prompts[prompt].clone();
            let (prompt_len, log_probs) = (tokens.len(), Vec::new());
            self.running.push(Running {
                prompt,
                slot,
                tokens,
                cached: 0,
                prompt_len,
                log_probs,
                draws: false,
            });
        }
    }

    /// Puts as many tokens of each running document into the pass as there is room for. Documents that wait
    /// for one token come first: a long prompt does not hold them up.
    fn fill(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.cu_seqlens.clear();
        self.cu_seqlens.push(0);
        self.in_pass.clear();
        let mut order: Vec<usize> = (0..self.running.len()).collect();
        order.sort_by_key(|i| self.running[*i].tokens.len() - self.running[*i].cached);
        for i in order {
            let doc = &mut self.running[i];
            let room = self.limits.pass_tokens - self.tokens.len();
            let new = doc.cached..(doc.cached + room).min(doc.tokens.len());
            doc.draws = false;
            if new.is_empty() {
                continue;
            }
            self.tokens.extend_from_slice(&doc.tokens[new.clone()]);
            self.positions.extend(new.start as u32..new.end as u32);
            self.cu_seqlens.push(self.tokens.len() as u32);
            self.slots.push(doc.slot);
            doc.cached = new.end;
            doc.draws = new.end == doc.tokens.len();
            self.in_pass.push(i);
        }
    }

    fn end_of(&self, doc: &Running, token: u32, goes_on: bool) -> Option<End> {
        let new = doc.tokens.len() - doc.prompt_len;
        if self.limits.end_ids.contains(&token) {
            Some(End::EndToken)
        } else if !goes_on {
            Some(End::Stopped)
        } else if new >= self.limits.max_new_tokens || doc.tokens.len() >= self.limits.capacity {
            Some(End::Length)
        } else {
            None
        }
    }
}

impl DecodeDriver for Batcher<'_> {
    fn next_batch(&mut self) -> Option<DecodeBatch<'_>> {
        self.admit();
        if self.running.is_empty() {
            return None;
        }
        self.fill();
        let Batcher { tokens, positions, cu_seqlens, slots, .. } = self;
        Some(DecodeBatch { tokens, positions, cu_seqlens, slots })
    }

    fn sample(&mut self, doc: usize, logits: &[f32]) -> u32 {
        let doc = &mut self.running[self.in_pass[doc]];
        if !doc.draws {
            // More of its prompt is to come: nobody asks what these logits say.
            return 0;
        }
        let token = self.sampler.draw(logits, &doc.tokens, doc.prompt as u32);
        doc.tokens.push(token);
        token
    }

    fn sampled(&mut self, log_probs: &[f32]) {
        let mut ended: Vec<(usize, End)> = Vec::new();
        for (i, log_prob) in self.in_pass.iter().zip(log_probs) {
            let doc = &mut self.running[*i];
            if !doc.draws {
                continue;
            }
            doc.log_probs.push(*log_prob);
            let token = doc.tokens[doc.tokens.len() - 1];
            let is_end = self.limits.end_ids.contains(&token);
            let heard = Drawn { prompt: doc.prompt, token, log_prob: *log_prob };
            let goes_on = is_end || (self.listener)(heard);
            if let Some(end) = self.end_of(&self.running[*i], token, goes_on) {
                ended.push((*i, end));
            }
        }
        // From the back, so that indices stay what they are.
        ended.sort_unstable_by_key(|(i, _)| std::cmp::Reverse(*i));
        for (i, end) in ended {
            let mut doc = self.running.swap_remove(i);
            if end == End::EndToken {
                doc.tokens.pop();
            }
            self.free.push(doc.slot);
            let tokens = doc.tokens.split_off(doc.prompt_len);
            self.done[doc.prompt] = Some(Completion { tokens, log_probs: doc.log_probs, end });
        }
    }
}
