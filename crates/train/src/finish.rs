//! The end of a run: the best model, the model folder, and what memory was used.

use lockstep_core::Bytes;
use lockstep_device::Device;
use lockstep_engine::{Engine, EngineError};

use crate::error::TrainError;
use crate::run::{Outcome, Trainer};
use crate::{resume, save};

/// What the plan said of memory, and what the system says of it: of the process, or of the GPU that a rank computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// The most that was resident at any time, on the rank that held most. Of a GPU, what the driver says is taken.
    pub peak: Bytes,
    /// On the device and on the host; of a GPU, on it alone.
    pub arena: Bytes,
    /// The plan's constant for code, libraries and data.
    pub foreign: Bytes,
}

impl MemoryUse {
    /// All ranks call it alike.
    fn of(engine: &Engine, peak: Option<Bytes>) -> Result<Option<MemoryUse>, EngineError> {
        let peaks = engine.all_gather_bytes("peak memory", &peak.map_or(0, |p| p.0).to_le_bytes())?;
        let number = |bytes: &Vec<u8>| bytes[..].try_into().map(u64::from_le_bytes).unwrap_or(0);
        let peak = Bytes(peaks.iter().map(number).max().unwrap_or(0));
        let plan = engine.plan();
        let arena = if plan.input.has_separate_memory() { plan.arena_bytes } else { engine.arena_bytes() };
        let foreign = plan.input.needs.overhead_bytes;
        Ok((peak > Bytes::ZERO).then_some(MemoryUse { peak, arena, foreign }))
    }

    /// To the byte, for the log.
    fn exact(&self) -> String {
        let [peak, planned, arena, foreign] =
            [self.peak, self.planned(), self.arena, self.foreign].map(|bytes| bytes.0);
        format!("peak memory {peak} bytes (planned {planned}: arena {arena}, foreign {foreign})")
    }

    pub fn planned(&self) -> Bytes {
        self.arena + self.foreign
    }
}

impl Trainer<'_> {
    /// Ends a run whose steps are all done: takes the best model if asked to, and writes the model folder.
    pub(crate) fn finish(mut self) -> Result<Outcome, TrainError> {
        let checkpoint = self.outcome.checkpoint.clone();
        self.run.check_trained(&self.position).map_err(|error| error.with_checkpoint(checkpoint))?;
        self.load_best()?;
        let model_dir = self.output.model();
        save::export(&self.engine, &self.identity.model_files, &model_dir)?;
        self.log.event(&format!("model folder {}", model_dir.display()))?;
        self.outcome.memory = MemoryUse::of(&self.engine, self.peak_memory()?)?;
        if let Some(memory) = self.outcome.memory {
            self.log.event(&memory.exact())?;
        }
        self.log.sync()?;
        self.progress.finish();
        Ok(self.outcome)
    }

    /// Loads the checkpoint of the best evaluation, where `load_best_model_at_end` asks for it.
    fn load_best(&mut self) -> Result<(), TrainError> {
        let wanted = self.run.config.eval.load_best_model_at_end;
        let Some(best) = self.position.best.filter(|_| wanted) else { return Ok(()) };
        if best.step != self.position.step {
            let path = self.output.checkpoints().join(format!("step-{}", best.step));
            let checkpoint = resume::open_sound(&self.engine, &path)?;
            let scale = self.run.scale_state();
            save::load_checkpoint(&mut self.engine, &checkpoint, &self.identity, scale)?;
        }
        self.report(&format!("the model is that of step {}, the best one", best.step))
    }

    /// The most memory this rank has held, where the system can say.
    fn peak_memory(&self) -> Result<Option<Bytes>, TrainError> {
        Ok(match self.machine.device {
            Device::Cpu => (self.peak_memory)(),
            // The driver counts what others hold of a shared GPU, too.
            Device::Cuda(_) if self.run.config.device.share_gpus => None,
            Device::Cuda(gpu) => Some(gpu.total - gpu.free_bytes().map_err(EngineError::from)?),
        })
    }
}
