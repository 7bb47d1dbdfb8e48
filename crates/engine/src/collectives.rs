//! Collectives that the caller runs between steps.

use std::sync::atomic::Ordering;

use lockstep_comm::{Call, Comm, CommError};
use lockstep_core::Axis;
use lockstep_core::fold::{FoldStep, fold_steps};

use crate::engine::Engine;
use crate::error::EngineError;

/// What ranks have exchanged.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchanged {
    /// Over all ranks.
    pub sums: Vec<f64>,
    pub maxima: Vec<f64>,
    /// The own numbers of each rank, in rank order.
    pub of_ranks: Vec<Vec<f64>>,
}

impl Engine {
    /// A description of what carries bytes between ranks. `None` for a single rank.
    pub fn carrier(&self) -> Option<String> {
        self.shared.transport.note()
    }

    /// The library in whose order collectives of a schedule sum on the CPU. `None`: the order is our own.
    pub fn summing_library(&self) -> Option<String> {
        self.shared.transport.summing_library()
    }

    /// A description of how states are read from and written to NVMe. `None` if nothing is offloaded there.
    pub fn nvme_io(&self) -> Option<&'static str> {
        self.shared.memories.offload_file.as_ref().map(|offload_file| offload_file.described())
    }

    /// Gathers the bytes of every rank, in rank order. All ranks must call it.
    pub fn all_gather_bytes(&self, what: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>, EngineError> {
        if self.shared.transport.is_single_rank() {
            return Ok(vec![mine.to_vec()]);
        }
        self.all_gather_bytes_along(what, Axis::World, mine)
    }

    /// Like [`Engine::all_gather_bytes`], among the ranks along an axis, of which there must be several.
    pub(crate) fn all_gather_bytes_along(
        &self,
        what: &str,
        axis: Axis,
        mine: &[u8],
    ) -> Result<Vec<Vec<u8>>, EngineError> {
        let group = self.shared.transport.group(axis);
        let mut all = vec![Vec::new(); group.len()];
        let each = &mut |member: usize, bytes: &[u8]| all[member].extend_from_slice(bytes);
        self.host_call(what, |comm, tag| comm.all_gather_bytes(group, tag, mine, each))?;
        Ok(all)
    }

    /// Gathers the numbers of every rank, in rank order. All ranks must call it; they may have different amounts.
    pub fn all_gather_f64(&self, what: &str, mine: &[f64]) -> Result<Vec<Vec<f64>>, EngineError> {
        let bytes: Vec<u8> = mine.iter().flat_map(|v| v.to_le_bytes()).collect();
        let number = |b: &[u8]| f64::from_le_bytes(b.try_into().expect("eight bytes"));
        let all = self.all_gather_bytes(what, &bytes)?;
        Ok(all.iter().map(|bytes| bytes.chunks_exact(8).map(number).collect()).collect())
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self, what: &str) -> Result<(), EngineError> {
        if self.shared.transport.is_single_rank() {
            return Ok(());
        }
        self.host_call(what, |comm, tag| comm.barrier(self.shared.transport.group(Axis::World), tag))
    }

    /// Runs a collective between steps. It does not wait for the comm lane, which may still be sending.
    fn host_call(
        &self,
        what: &str,
        call: impl FnOnce(&mut Comm, u64) -> Result<(), CommError>,
    ) -> Result<(), EngineError> {
        // If a lane has failed, or fails during the call, its error is the one to report.
        self.shared.lanes.synchronize(&[])?;
        let called = self
            .shared
            .running
            .between_steps(what, || call(&mut self.shared.transport.host(), self.next_tag()));
        called.map_err(|cause| {
            let lane_failed = self.shared.lanes.synchronize(&[]).err();
            // The lanes must not keep waiting for a rank that this call has found lost.
            self.shared.fail(EngineError::Stopped);
            lane_failed.unwrap_or_else(|| EngineError::Comm { op: what.to_string(), cause })
        })
    }

    /// Sums numbers over all ranks in a fixed order, so that every rank gets the same bits.
    pub fn all_reduce_sum<const N: usize>(
        &self,
        what: &str,
        mine: [f64; N],
    ) -> Result<[f64; N], EngineError> {
        let sums = self.all_reduce_sum_slice(what, &mine)?;
        Ok(std::array::from_fn(|i| sums[i]))
    }

    /// Like [`Engine::all_reduce_sum`], for any number of values.
    pub fn all_reduce_sum_slice(&self, what: &str, mine: &[f64]) -> Result<Vec<f64>, EngineError> {
        self.all_reduce_sums_and_maxima(what, mine, &[]).map(|(sums, _)| sums)
    }

    /// Sums some numbers over all ranks, in a fixed order, and takes the maximum of others, in one exchange.
    pub fn all_reduce_sums_and_maxima(
        &self,
        what: &str,
        sums: &[f64],
        maxima: &[f64],
    ) -> Result<(Vec<f64>, Vec<f64>), EngineError> {
        self.exchange(what, sums, maxima, &[]).map(|exchange| (exchange.sums, exchange.maxima))
    }

    /// Like [`Engine::all_reduce_sums_and_maxima`]; every rank also gets the `own` numbers of each rank, as many on all of
    /// them, in the same exchange.
    pub fn exchange(
        &self,
        what: &str,
        sums: &[f64],
        maxima: &[f64],
        own: &[f64],
    ) -> Result<Exchanged, EngineError> {
        let reduced = sums.len() + maxima.len();
        let mine: Vec<f64> = sums.iter().chain(maxima).chain(own).copied().collect();
        let all = self.all_gather_f64(what, &mine)?;
        let mut stack: Vec<Vec<f64>> = Vec::new();
        let nodes: Vec<u32> = self.shared.transport.group(Axis::World).nodes().to_vec();
        fold_steps(&nodes, &mut |step| match step {
            FoldStep::Push(rank) => stack.push(all[rank][..reduced].to_vec()),
            FoldStep::Add => {
                let (right, left) = (stack.pop().expect("two sides"), stack.pop().expect("two sides"));
                let fold =
                    |(i, (l, r)): (usize, (&f64, &f64))| if i < sums.len() { l + r } else { l.max(*r) };
                stack.push(left.iter().zip(&right).enumerate().map(fold).collect());
            }
        });
        let mut totals = stack.pop().expect("a world has a rank");
        let maxima = totals.split_off(sums.len());
        let of_ranks = all.into_iter().map(|mut numbers| numbers.split_off(reduced)).collect();
        Ok(Exchanged { sums: totals, maxima, of_ranks })
    }

    /// The tag of the next call. All ranks count their calls in the same order, so a tag identifies one call.
    fn next_tag(&self) -> u64 {
        Call::HOST + self.shared.host_calls.fetch_add(1, Ordering::Relaxed)
    }
}
