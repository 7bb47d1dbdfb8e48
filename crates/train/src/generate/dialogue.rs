//! One conversation: each turn's prompt begins with what the cache already holds, and only the rest runs.

use lockstep_engine::{DecodeBatch, DecodeDriver};

use super::batch::{Drawn, Limits, Listener};
use super::sample::{Sampler, Sampling};

/// Asked for the next turn's whole prompt, given the last reply; `None` ends the conversation.
pub type NextTurn<'a> = dyn FnMut(&[u32]) -> Option<Vec<u32>> + 'a;

pub(super) struct Dialogue<'a> {
    limits: Limits,
    sampler: Sampler,
    turn: &'a mut NextTurn<'a>,
    listener: &'a mut Listener<'a>,
    /// The document, and how much of it is in the cache.
    tokens: Vec<u32>,
    cached: usize,
    prompt_len: usize,
    replying: bool,
    pass: (Vec<u32>, Vec<u32>, [u32; 2]),
}

impl<'a> Dialogue<'a> {
    pub(super) fn new(
        limits: Limits,
        sampling: Sampling,
        turn: &'a mut NextTurn<'a>,
        listener: &'a mut Listener<'a>,
    ) -> Dialogue<'a> {
        Dialogue {
            limits,
            sampler: Sampler::new(sampling),
            turn,
            listener,
            tokens: Vec::new(),
            cached: 0,
            prompt_len: 0,
            replying: false,
            pass: Default::default(),
        }
    }

    /// Takes a prompt; what it shares with the document stays in the cache.
    fn begin(&mut self, prompt: Vec<u32>) {
        let shared = prompt.iter().zip(&self.tokens[..self.cached]).take_while(|(a, b)| a == b).count();
        // At least one token runs: the first of the reply is drawn from it.
        self.cached = shared.min(prompt.len().saturating_sub(1));
        self.prompt_len = prompt.len();
        self.tokens = prompt;
        self.replying = true;
    }
}

impl DecodeDriver for Dialogue<'_> {
    fn next_batch(&mut self) -> Option<DecodeBatch<'_>> {
        while !self.replying {
            let reply = &self.tokens[self.prompt_len.min(self.tokens.len())..];
            let prompt = (self.turn)(reply)?;
            if !prompt.is_empty() && prompt.len() < self.limits.capacity {
                self.begin(prompt);
            }
        }
        let end = (self.cached + self.limits.pass_tokens).min(self.tokens.len());
        let (tokens, positions, bounds) = &mut self.pass;
        tokens.clear();
        tokens.extend_from_slice(&self.tokens[self.cached..end]);
        positions.clear();
        positions.extend(self.cached as u32..end as u32);
        *bounds = [0, tokens.len() as u32];
        self.cached = end;
        Some(DecodeBatch { tokens, positions, cu_seqlens: bounds, slots: &[0] })
    }

    fn sample(&mut self, _doc: usize, logits: &[f32]) -> u32 {
        if self.cached < self.tokens.len() {
            return 0;
        }
        let token = self.sampler.draw(logits, &self.tokens, 0);
        self.tokens.push(token);
        token
    }

    fn sampled(&mut self, log_probs: &[f32]) {
        if self.cached == self.tokens.len() || self.cached < self.prompt_len {
            return;
        }
        let token = self.tokens[self.tokens.len() - 1];
        if self.limits.end_ids.contains(&token) {
            self.tokens.pop();
            self.replying = false;
            return;
        }
        let goes_on = (self.listener)(Drawn { prompt: 0, token, log_prob: log_probs[0] });
        let new = self.tokens.len() - self.prompt_len;
        let full = new >= self.limits.max_new_tokens || self.tokens.len() >= self.limits.capacity;
        self.replying = goes_on && !full;
    }
}
