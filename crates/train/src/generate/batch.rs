//! Continuous batching: sequences share the pages of a KV cache, and when one ends, the next one takes its pages.
//!
//! The completions of a request have the same prompt. Its tokens but the last are computed once, by the first
//! completion. The others start with the pages that these tokens fill, and with a copy of the page that they fill in
//! part. Every completion runs the last token of the prompt itself, to sample from its logits.
//!
//! A sequence is admitted if the pages of its largest possible length are free, not counting those it shares, and it
//! keeps them until it ends. So every admitted sequence can finish without waiting for pages, and none is ever
//! preempted; in return, pages that it does not reach are not used by others. Sequences are admitted in order. Thus at
//! most one request has completions that are admitted and others that are not, and if nothing runs, the next sequence
//! fits: all pages are free except those of its own prompt.
//!
//! Neither pages nor the order of sequences affect results: a token is a function of the seed, its sequence and its
//! position.

use lockstep_engine::{DecodeBatch, DecodeDriver};
use lockstep_plan::{GenerationBounds, ModelPlan};

use super::pages::PagePool;
use super::request::{Completion, DecodeLimits, FinishReason, GenerateRequest, SampledToken, TokenCallback};
use super::sample::{Sampler, SamplingParams};

/// What a plan allows.
#[derive(Clone, Copy, Debug)]
pub(super) struct DecodeBounds {
    /// New tokens in one pass.
    pub(super) pass_tokens: usize,
    pub(super) generation: GenerationBounds,
}

impl DecodeBounds {
    pub(super) fn of(plan: &ModelPlan) -> DecodeBounds {
        let generation = plan.generation.expect("the model has a generate phase");
        DecodeBounds { pass_tokens: plan.bounds.tokens, generation }
    }

    /// The most tokens of a sequence, including its prompt.
    pub(super) fn capacity(&self) -> usize {
        self.generation.tokens_per_doc
    }
}

/// The state of a request whose completions share pages.
#[derive(Debug, Default)]
struct SharedPrompt {
    /// The pages of the shared tokens, of which the last may be filled in part. Held until the last completion has
    /// started.
    pages: Vec<u32>,
    /// Whether the shared tokens are in the cache.
    computed: bool,
    /// Completions that have not started.
    num_unstarted: usize,
}

/// A sequence that was admitted.
#[derive(Debug)]
struct ActiveSequence {
    request: usize,
    completion: usize,
    /// Its pages, up to its largest possible length.
    pages: Vec<u32>,
    /// The copy of a page to make before its first pass.
    page_copy: Option<(u32, u32)>,
    started: bool,
    /// The prompt and the generated tokens.
    tokens: Vec<u32>,
    /// Tokens in the cache, including those of the current pass.
    cached: usize,
    log_probs: Vec<f32>,
    /// Whether the current pass includes all its tokens, so that the next one can be sampled.
    samples: bool,
}

/// The tokens of a pass, as in [`DecodeBatch`].
#[derive(Debug, Default)]
struct Pass {
    /// Indices of the active sequences with tokens in the pass.
    sequences: Vec<usize>,
    tokens: Vec<u32>,
    positions: Vec<u32>,
    cu_seqlens: Vec<u32>,
    page_tables: Vec<u32>,
    page_copies: Vec<(u32, u32)>,
}

/// Generates the completions of all requests.
pub(super) struct Batcher<'a> {
    requests: &'a [GenerateRequest<'a>],
    bounds: DecodeBounds,
    limits: DecodeLimits,
    sampler: Sampler,
    on_token: &'a mut TokenCallback<'a>,
    pool: PagePool,
    /// One for each request.
    prompts: Vec<SharedPrompt>,
    /// The next sequence to admit: its request and its index among the completions.
    next: (usize, usize),
    active: Vec<ActiveSequence>,
    pass: Pass,
    done: Vec<Vec<Option<Completion>>>,
}

impl<'a> Batcher<'a> {
    pub(super) fn new(
        requests: &'a [GenerateRequest<'a>],
        bounds: DecodeBounds,
        limits: DecodeLimits,
        sampling: SamplingParams,
        on_token: &'a mut TokenCallback<'a>,
    ) -> Batcher<'a> {
        Batcher {
            requests,
            bounds,
            limits,
            sampler: Sampler::new(sampling),
            on_token,
            pool: PagePool::new(bounds.generation.pages),
            prompts: requests.iter().map(|_| SharedPrompt::default()).collect(),
            next: (0, 0),
            active: Vec::new(),
            pass: Pass::default(),
            done: requests.iter().map(|request| vec![None; request.completions]).collect(),
        }
    }

    /// The completions of each request.
    pub(super) fn finish(self) -> Vec<Vec<Completion>> {
        let ended = |one: Option<Completion>| one.expect("the phase ends when every sequence has ended");
        self.done.into_iter().map(|request| request.into_iter().map(ended).collect()).collect()
    }

    #[cfg(test)]
    pub(super) fn num_free_pages(&self) -> usize {
        self.pool.num_free()
    }

    /// The tokens that the completions of a request share.
    fn num_shared(&self, request: usize) -> usize {
        let GenerateRequest { prompt, completions, .. } = self.requests[request];
        if completions > 1 { prompt.len() - 1 } else { 0 }
    }

    /// Admits sequences in order, as long as there are pages for them.
    fn admit(&mut self) {
        while self.active.len() < self.bounds.generation.docs {
            while self.requests.get(self.next.0).is_some_and(|request| self.next.1 == request.completions) {
                self.next = (self.next.0 + 1, 0);
            }
            if self.next.0 == self.requests.len() || !self.admit_one(self.next.0, self.next.1) {
                return;
            }
            self.next.1 += 1;
        }
    }

    /// Admits a sequence, unless there are too few pages.
    fn admit_one(&mut self, request: usize, completion: usize) -> bool {
        let GenerateRequest { prompt, completions, .. } = self.requests[request];
        let page_tokens = self.bounds.generation.page_tokens;
        let shared = self.num_shared(request);
        let first = completion == 0;
        // Pages of the prompt to use as they are, and a page to copy.
        let (mut reused, mut copied) = (0, None);
        if !first {
            let all = &self.prompts[request].pages;
            reused = shared / page_tokens;
            if let Some(part) = all.get(reused) {
                // New tokens do not change the shared ones before them. So a sequence may store its tokens in the last
                // page itself, if no other one does.
                match self.pool.num_users(*part) {
                    1 => reused += 1,
                    _ => copied = Some(*part),
                }
            }
        }
        // The last token that is generated is not stored.
        let longest = (prompt.len() + self.limits.max_new_tokens.max(1)).min(self.bounds.capacity());
        let num_pages = (longest - 1).div_ceil(page_tokens);
        if self.pool.num_free() < num_pages - reused {
            return false;
        }
        let mut pages = self.prompts[request].pages[..reused].to_vec();
        pages.iter().for_each(|page| self.pool.share(*page));
        pages.extend((reused..num_pages).map(|_| self.pool.take()));
        if first {
            let of_prompt = pages[..shared.div_ceil(page_tokens)].to_vec();
            of_prompt.iter().for_each(|page| self.pool.share(*page));
            let (computed, num_unstarted) = (shared == 0, completions);
            self.prompts[request] = SharedPrompt { pages: of_prompt, computed, num_unstarted };
        }
        self.active.push(ActiveSequence {
            request,
            completion,
            page_copy: copied.map(|from| (from, pages[reused])),
            pages,
            started: false,
            tokens: prompt.to_vec(),
            cached: if first { 0 } else { shared },
            log_probs: Vec::new(),
            samples: false,
        });
        true
    }

    /// Fills the pass with as many tokens of each active sequence as fit. Sequences with the fewest new tokens come
    /// first, so that a long prompt does not delay those that decode one token.
    fn fill(&mut self) {
        let Batcher { pass, active, prompts, pool, bounds, .. } = self;
        pass.sequences.clear();
        pass.tokens.clear();
        pass.positions.clear();
        pass.page_tables.clear();
        pass.page_copies.clear();
        pass.cu_seqlens.clear();
        pass.cu_seqlens.push(0);
        let mut order: Vec<usize> = (0..active.len()).collect();
        order.sort_by_key(|i| active[*i].tokens.len() - active[*i].cached);
        for i in order {
            let sequence = &mut active[i];
            sequence.samples = false;
            let prompt = &mut prompts[sequence.request];
            let space = bounds.pass_tokens - pass.tokens.len();
            let new = sequence.cached..(sequence.cached + space).min(sequence.tokens.len());
            if new.is_empty() || (sequence.completion > 0 && !prompt.computed) {
                continue;
            }
            if !sequence.started {
                sequence.started = true;
                pass.page_copies.extend(sequence.page_copy);
                prompt.num_unstarted -= 1;
                if prompt.num_unstarted == 0 {
                    // The copy is made before a page can be used again.
                    pool.release(&std::mem::take(&mut prompt.pages));
                }
            }
            pass.tokens.extend_from_slice(&sequence.tokens[new.clone()]);
            pass.positions.extend(new.start as u32..new.end as u32);
            pass.cu_seqlens.push(pass.tokens.len() as u32);
            pass.page_tables.extend_from_slice(&sequence.pages);
            pass.sequences.push(i);
            pass.page_tables.resize(pass.sequences.len() * bounds.generation.pages_per_doc(), 0);
            sequence.cached = new.end;
            sequence.samples = new.end == sequence.tokens.len();
        }
    }

    fn finish_reason(&self, sequence: &ActiveSequence, token: u32, continues: bool) -> Option<FinishReason> {
        let new = sequence.log_probs.len();
        if self.limits.end_ids.contains(&token) {
            Some(FinishReason::EndToken)
        } else if !continues {
            Some(FinishReason::Stopped)
        } else if new >= self.limits.max_new_tokens || sequence.tokens.len() >= self.bounds.capacity() {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    fn end(&mut self, i: usize, end: FinishReason) {
        let mut sequence = self.active.swap_remove(i);
        let end_token = (end == FinishReason::EndToken).then(|| sequence.tokens.pop()).flatten();
        self.pool.release(&sequence.pages);
        let tokens = sequence.tokens.split_off(self.requests[sequence.request].prompt.len());
        let completion = Completion { tokens, log_probs: sequence.log_probs, end, end_token };
        self.done[sequence.request][sequence.completion] = Some(completion);
    }
}

impl DecodeDriver for Batcher<'_> {
    fn next_batch(&mut self) -> Option<DecodeBatch<'_>> {
        self.admit();
        if self.active.is_empty() {
            assert_eq!(self.next.0, self.requests.len(), "one sequence fits into an empty KV cache");
            return None;
        }
        self.fill();
        let Pass { tokens, positions, cu_seqlens, page_tables, page_copies, .. } = &self.pass;
        Some(DecodeBatch { tokens, positions, cu_seqlens, page_tables, page_copies })
    }

    fn sample(&mut self, doc: usize, logits: &[f32]) -> u32 {
        let sequence = &mut self.active[self.pass.sequences[doc]];
        if !sequence.samples {
            // The rest of the prompt follows in a later pass, so these logits are not used.
            return 0;
        }
        let sample = self.requests[sequence.request].first_sample + sequence.completion as u32;
        let token = self.sampler.sample(logits, &sequence.tokens, sample);
        sequence.tokens.push(token);
        token
    }

    fn sampled(&mut self, log_probs: &[f32]) {
        let mut ended: Vec<(usize, FinishReason)> = Vec::new();
        for (i, log_prob) in self.pass.sequences.iter().zip(log_probs) {
            let (request, cached) = (self.active[*i].request, self.active[*i].cached);
            self.prompts[request].computed |= cached >= self.num_shared(request);
            let sequence = &mut self.active[*i];
            if !sequence.samples {
                continue;
            }
            sequence.log_probs.push(*log_prob);
            let token = sequence.tokens[sequence.tokens.len() - 1];
            let is_end = self.limits.end_ids.contains(&token);
            let (prompt, completion) = (sequence.request, sequence.completion);
            let sampled = SampledToken { prompt, completion, token, log_prob: *log_prob };
            let continues = is_end || (self.on_token)(sampled);
            if let Some(end) = self.finish_reason(&self.active[*i], token, continues) {
                ended.push((*i, end));
            }
        }
        // Remove from the back, so that `swap_remove` does not move sequences that are still to be removed.
        ended.sort_unstable_by_key(|(i, _)| std::cmp::Reverse(*i));
        for (i, end) in ended {
            self.end(i, end);
        }
    }
}
