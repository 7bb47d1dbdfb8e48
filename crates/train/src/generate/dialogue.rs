//! One conversation with a reused KV cache: each turn's prompt starts with tokens that are already in the cache, and
//! only the rest is computed.

use lockstep_engine::{DecodeBatch, DecodeDriver};

use super::batch::DecodeBounds;
use super::request::{DecodeLimits, SampledToken, TokenCallback};
use super::sample::{Sampler, SamplingParams};

/// Called with the last reply. Returns the whole prompt of the next turn, or `None` to end the conversation.
pub type NextTurn<'a> = dyn FnMut(&[u32]) -> Option<Vec<u32>> + 'a;

pub(super) struct Dialogue<'a> {
    bounds: DecodeBounds,
    limits: DecodeLimits,
    sampler: Sampler,
    turn: &'a mut NextTurn<'a>,
    on_token: &'a mut TokenCallback<'a>,
    /// The conversation so far, and how many of its tokens are in the cache.
    tokens: Vec<u32>,
    cached: usize,
    prompt_len: usize,
    replying: bool,
    pass: (Vec<u32>, Vec<u32>, [u32; 2]),
    /// The conversation has the first pages for itself.
    pages: Vec<u32>,
}

impl<'a> Dialogue<'a> {
    pub(super) fn new(
        bounds: DecodeBounds,
        limits: DecodeLimits,
        sampling: SamplingParams,
        turn: &'a mut NextTurn<'a>,
        on_token: &'a mut TokenCallback<'a>,
    ) -> Dialogue<'a> {
        Dialogue {
            bounds,
            limits,
            sampler: Sampler::new(sampling),
            turn,
            on_token,
            tokens: Vec::new(),
            cached: 0,
            prompt_len: 0,
            replying: false,
            pass: Default::default(),
            pages: (0..bounds.generation.pages_per_doc() as u32).collect(),
        }
    }

    /// Starts a reply to `prompt`. The prefix that it shares with the conversation so far stays in the cache.
    fn begin(&mut self, prompt: Vec<u32>) {
        let shared = prompt.iter().zip(&self.tokens[..self.cached]).take_while(|(a, b)| a == b).count();
        // Compute at least one token: the first token of the reply is sampled from its logits.
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
            if !prompt.is_empty() && prompt.len() < self.bounds.capacity() {
                self.begin(prompt);
            }
        }
        let end = (self.cached + self.bounds.pass_tokens).min(self.tokens.len());
        let (tokens, positions, bounds) = &mut self.pass;
        tokens.clear();
        tokens.extend_from_slice(&self.tokens[self.cached..end]);
        positions.clear();
        positions.extend(self.cached as u32..end as u32);
        *bounds = [0, tokens.len() as u32];
        self.cached = end;
        Some(DecodeBatch {
            tokens,
            positions,
            cu_seqlens: bounds,
            page_tables: &self.pages,
            page_copies: &[],
        })
    }

    fn sample(&mut self, _doc: usize, logits: &[f32]) -> u32 {
        if self.cached < self.tokens.len() {
            return 0;
        }
        let token = self.sampler.sample(logits, &self.tokens, 0);
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
        let continues =
            (self.on_token)(SampledToken { prompt: 0, completion: 0, token, log_prob: log_probs[0] });
        let new = self.tokens.len() - self.prompt_len;
        let full = new >= self.limits.max_new_tokens || self.tokens.len() >= self.bounds.capacity();
        self.replying = continues && !full;
    }
}
