//! Steps overlap in the training loop: the next step begins while parameters of the last one are still being published.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use lockstep_comm::{Abort, Call, CallKind, Carrier, Comm, CommError, thread_world};
use lockstep_core::Rank;
use lockstep_data::Batch;
use lockstep_device::{Device, View};
use lockstep_engine::{CommUse, Comms};
use lockstep_observe::NoProgress;
use lockstep_plan::{ModelId, OpKind, PhaseKind, RunPlan};
use lockstep_train::{
    Coefficients, Connection, Metrics, Objective, Outputs, Sft, StepCounts, prepare_for, train_with,
};

const RANKS: u32 = 2;

/// Much longer than any step of this test.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The number of steps that a rank's loop has begun.
#[derive(Default)]
struct Progress {
    begun: Mutex<u64>,
    changed: Condvar,
}

impl Progress {
    fn begin(&self) {
        *self.begun.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    /// Whether the loop begins this step before the timeout.
    fn begins(&self, step: u64) -> bool {
        let begun = self.begun.lock().unwrap();
        !self.changed.wait_timeout_while(begun, TIMEOUT, |begun| *begun < step).unwrap().1.timed_out()
    }
}

/// Plain fine-tuning that records when a step begins.
struct WatchedSft {
    sft: Sft,
    progress: Arc<Progress>,
}

impl Objective for WatchedSft {
    fn coefficients_ahead(&self) -> bool {
        self.sft.coefficients_ahead()
    }

    fn begin(&mut self, counts: &StepCounts) {
        self.progress.begin();
        self.sft.begin(counts);
    }

    fn coefficients(
        &mut self,
        index: usize,
        batch: &Batch,
        outputs: Option<Outputs<'_>>,
        out: &mut Coefficients<'_>,
    ) {
        self.sft.coefficients(index, batch, outputs, out);
    }

    fn outputs(&mut self, batch: &Batch, outputs: Outputs<'_>) {
        self.sft.outputs(batch, outputs);
    }

    fn sums(&self) -> Vec<f64> {
        self.sft.sums()
    }

    fn metrics(&self, sums: &[f64], maxima: &[f64]) -> Metrics {
        self.sft.metrics(sums, maxima)
    }
}

/// A carrier that delays one collective of the first step until the loop has begun the second step.
struct DelayingCarrier<C> {
    inner: C,
    tag: u64,
    progress: Arc<Progress>,
    /// Whether the second step began in time.
    seen: Arc<Mutex<Option<bool>>>,
}

impl<C: Carrier> Carrier for DelayingCarrier<C> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn world(&self) -> u32 {
        self.inner.world()
    }

    fn abort(&self) -> Abort {
        self.inner.abort()
    }

    fn set_deadline(&mut self, deadline: Duration) {
        self.inner.set_deadline(deadline);
    }

    fn post(&mut self, peer: Rank, call: &Call, offers: &[View<'_>]) -> Result<(), CommError> {
        if call.tag == self.tag && call.kind == CallKind::AllGather {
            self.seen.lock().unwrap().get_or_insert_with(|| self.progress.begins(2));
        }
        self.inner.post(peer, call, offers)
    }

    fn meet(&mut self, peer: Rank, call: &Call) -> Result<(), CommError> {
        self.inner.meet(peer, call)
    }

    fn pull(&mut self, peer: Rank, into: View<'_>) -> Result<(), CommError> {
        self.inner.pull(peer, into)
    }

    fn done(&mut self, peer: Rank) -> Result<(), CommError> {
        self.inner.done(peer)
    }

    fn finish(&mut self, peer: Rank) -> Result<(), CommError> {
        self.inner.finish(peer)
    }
}

/// The last operation that publishes parameters: those of the head, which forward needs last.
fn last_publish(plan: &RunPlan) -> u64 {
    let train = &plan.phases[plan.phase(PhaseKind::Train, ModelId::FIRST).unwrap()];
    let publishes =
        train.schedule.ops.iter().rposition(|op| matches!(op.kind, OpKind::AllGatherUpdated { .. }));
    publishes.expect("parameters are published") as u64
}

/// Whether every rank began its second step while the first was still publishing.
fn overlaps(folder: &Path, strategy: &str) -> bool {
    let rows: String = (0..16).map(|i| format!("{{\"text\": \"{i} and {} follow\"}}\n", i + 1)).collect();
    std::fs::write(folder.join("data.jsonl"), rows).unwrap();
    let text = format!(
        "model: tiny\nmax_length: 32\nmax_steps: 3\nsave_strategy: no\nthreads: 1\nnproc: {RANKS}\nstrategy: {strategy}\n\
         train_files: {0}/data.jsonl\noutput_dir: {0}/{strategy}\n",
        folder.display()
    );
    let source = lockstep_config::Source { name: "overlap", text: &text };
    let config = lockstep_config::load(Some(source), &[]).unwrap();
    let world = || thread_world(RANKS, Duration::from_secs(30)).into_iter();
    let seen: Vec<Option<bool>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = world()
            .zip(world())
            .map(|(lane, host)| {
                let (config, text) = (&config, &text);
                scope.spawn(move || {
                    let progress = Arc::new(Progress::default());
                    let mut objective = WatchedSft { sft: Sft::default(), progress: progress.clone() };
                    let prepared = prepare_for(config, lane.rank(), Device::Cpu, &objective).unwrap();
                    let (tag, seen) = (last_publish(&prepared.plan), Arc::default());
                    let delayed = DelayingCarrier { inner: lane, tag, progress, seen: Arc::clone(&seen) };
                    let (mut lane, mut host) = (Some(delayed), Some(host));
                    let comms = Comms::connect(|purpose| {
                        Ok::<_, ()>(match purpose {
                            CommUse::Lane(_) => Comm::new(Box::new(lane.take().unwrap())),
                            CommUse::BetweenSteps => Comm::new(Box::new(host.take().unwrap())),
                        })
                    });
                    let comms = comms.unwrap();
                    let connect = Box::new(move |_: &_| Ok(Connection { comms, nccl: None }));
                    train_with(config, text, prepared, Some(connect), &mut objective, &mut NoProgress)
                        .unwrap();
                    *seen.lock().unwrap()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    seen.iter().all(|seen| *seen == Some(true))
}

#[test]
fn the_loop_does_not_wait_for_parameters_to_be_published() {
    let folder = tempfile::tempdir().unwrap();
    for strategy in ["zero1", "zero2"] {
        assert!(overlaps(folder.path(), strategy), "{strategy}: the second step waited for the first");
    }
}
