//! Ends a run: loads the best model, exports the model folder, and reports memory use.

use lockstep_core::Bytes;
use lockstep_device::Device;
use lockstep_engine::{Engine, EngineError};

use crate::error::TrainError;
use crate::trainer::{TrainOutcome, Trainer};
use crate::{resume, save};

/// Planned and actual memory, of the process or of the GPU that a rank uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// The peak resident memory of the rank that used most. For a GPU, the used memory that the driver reports.
    pub peak: Bytes,
    /// The arenas on the device and on the host; for a GPU, only the one on the device.
    pub arena: Bytes,
    /// The plan's estimate for code, libraries and data.
    pub foreign: Bytes,
}

impl MemoryUse {
    /// A collective call. `None` if the system does not report memory use.
    fn of(engine: &Engine, peak: Option<Bytes>) -> Result<Option<MemoryUse>, EngineError> {
        let peaks = engine.all_gather_bytes("peak memory", &peak.map_or(0, |p| p.0).to_le_bytes())?;
        let number = |bytes: &Vec<u8>| bytes[..].try_into().map(u64::from_le_bytes).unwrap_or(0);
        let peak = Bytes(peaks.iter().map(number).max().unwrap_or(0));
        let plan = engine.plan();
        let arena = if plan.input.has_separate_memory() { plan.arena_bytes } else { engine.arena_bytes() };
        let foreign = plan.input.needs.overhead_bytes;
        Ok((peak > Bytes::ZERO).then_some(MemoryUse { peak, arena, foreign }))
    }

    /// The line for the log, with exact numbers.
    fn log_line(&self) -> String {
        let [peak, planned, arena, foreign] =
            [self.peak, self.planned(), self.arena, self.foreign].map(|bytes| bytes.0);
        format!("peak memory {peak} bytes (planned {planned}: arena {arena}, foreign {foreign})")
    }

    pub fn planned(&self) -> Bytes {
        self.arena + self.foreign
    }
}

impl Trainer<'_> {
    /// Ends a run after its last step: loads the best model if configured, and exports the model folder.
    pub(crate) fn finish(mut self) -> Result<TrainOutcome, TrainError> {
        let checkpoint = self.outcome.checkpoint.clone();
        self.state.check_trained(&self.position).map_err(|error| error.with_checkpoint(checkpoint))?;
        self.load_best()?;
        let model_dir = self.output.model();
        save::export(&self.engine, &self.identity.model_files, &model_dir)?;
        self.log.event(&format!("model folder {}", model_dir.display()))?;
        self.outcome.memory = MemoryUse::of(&self.engine, self.peak_memory()?)?;
        if let Some(memory) = self.outcome.memory {
            self.log.event(&memory.log_line())?;
        }
        self.end_measuring(true)?;
        self.log.sync()?;
        self.progress.finish();
        Ok(self.outcome)
    }

    /// Loads the checkpoint with the best evaluation if `load_best_model_at_end` is set.
    fn load_best(&mut self) -> Result<(), TrainError> {
        let wanted = self.state.config.eval.load_best_model_at_end;
        let Some(best) = self.position.best.filter(|_| wanted) else { return Ok(()) };
        if best.step != self.position.step {
            let path = self.output.checkpoints().join(format!("step-{}", best.step));
            let checkpoint = resume::open_intact(&self.engine, &path)?;
            let scale = self.state.scale_state();
            save::load_checkpoint(&mut self.engine, &checkpoint, &self.identity, scale)?;
        }
        self.report(&format!("using the model of step {}, which had the best evaluation", best.step))
    }

    /// The peak memory of this rank, if the system reports it.
    fn peak_memory(&self) -> Result<Option<Bytes>, TrainError> {
        Ok(match self.machine.device {
            Device::Cpu => (self.peak_memory)(),
            // On a shared GPU the driver's number includes other ranks.
            Device::Cuda(_) if self.state.config.device.share_gpus => None,
            Device::Cuda(gpu) => Some(gpu.total - gpu.free_bytes().map_err(EngineError::from)?),
        })
    }
}
