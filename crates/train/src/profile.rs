//! `profile_steps`: records when the operations of some steps ran on every rank, and writes the timeline.
//!
//! Ranks add their own clocks to the offsets that they find before the first of these steps: all read their clocks when
//! they leave a barrier. The clocks of one host agree better than that shows, so small offsets count as none.

use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use lockstep_core::Rank;
use lockstep_engine::{Engine, Measurement};
use lockstep_observe::{ObserveError, Trace, TraceSpan};

use crate::error::TrainError;
use crate::step_meter::StepTimes;

/// Barriers after which clocks are compared.
const CLOCK_ROUNDS: usize = 5;
/// Ranks leave a barrier within this time of each other.
const CLOCK_ERROR_US: f64 = 500.0;

/// Records a range of steps.
pub(crate) struct Profiler {
    first: u64,
    last: u64,
    /// What is measured in other steps.
    otherwise: Measurement,
    folder: PathBuf,
    recording: Option<Recording>,
}

struct Recording {
    trace: Trace,
    first: u64,
    last: u64,
    clock: Clock,
}

impl Profiler {
    pub(crate) fn new((first, last): (u64, u64), otherwise: Measurement, output: &Path) -> Profiler {
        Profiler { first, last, otherwise, folder: output.join("profile"), recording: None }
    }

    /// Before step `step`, from 1. A collective call.
    pub(crate) fn before_step(&mut self, engine: &mut Engine, step: u64) -> Result<(), TrainError> {
        if self.recording.is_none() && (self.first..=self.last).contains(&step) {
            let clock = Clock::compared(engine)?;
            engine.measure(Measurement::Timeline)?;
            self.recording = Some(Recording { trace: Trace::default(), first: step, last: step, clock });
        }
        Ok(())
    }

    /// After a step. Returns the file that was written after the last one.
    pub(crate) fn after_step(
        &mut self,
        engine: &mut Engine,
        step: u64,
        times: &StepTimes,
    ) -> Result<Option<PathBuf>, TrainError> {
        let Some(recording) = &mut self.recording else { return Ok(None) };
        recording.last = step;
        let clock = recording.clock;
        let mut add = |track: &str, name: String, category, start: Instant, seconds: f64| {
            let (start_us, duration_us) = (clock.micros(start), seconds * 1e6);
            recording.trace.add(TraceSpan { track: track.into(), name, category, start_us, duration_us });
        };
        for span in engine.take_spans()? {
            let category = span.activity.name();
            add(&span.lane.to_string(), span.name, category, span.start, span.seconds);
        }
        let parts = [
            (format!("step {step}: batches"), "data", times.start, times.ready),
            (format!("step {step}: phases"), "step", times.ready, times.exchange),
            (format!("step {step}: exchange"), "exchange", times.exchange, times.exchanged),
        ];
        for (name, category, start, end) in parts {
            add("loop", name, category, start, end.saturating_duration_since(start).as_secs_f64());
        }
        if step >= self.last { self.finish(engine) } else { Ok(None) }
    }

    /// Writes what was recorded, if that is not done. A collective call.
    pub(crate) fn finish(&mut self, engine: &mut Engine) -> Result<Option<PathBuf>, TrainError> {
        let Some(recording) = self.recording.take() else { return Ok(None) };
        engine.measure(self.otherwise)?;
        let starts = engine
            .all_gather_f64("the start of the profile", &[recording.trace.start_us().unwrap_or(f64::NAN)])?;
        let origin = starts.iter().flatten().copied().fold(f64::NAN, f64::min);
        let events = recording.trace.events(engine.rank().0, if origin.is_nan() { 0.0 } else { origin });
        let parts = engine.all_gather_bytes("the profile", events.as_bytes())?;
        if engine.rank() != Rank(0) {
            return Ok(None);
        }
        let parts: Vec<String> =
            parts.iter().map(|part| String::from_utf8_lossy(part).into_owned()).collect();
        let path = self.folder.join(format!("steps-{}-{}.json", recording.first, recording.last));
        let written =
            std::fs::create_dir_all(&self.folder).and_then(|()| std::fs::write(&path, Trace::file(&parts)));
        written.map_err(|source| ObserveError::Write { path: path.clone(), source })?;
        Ok(Some(path))
    }
}

/// Converts this rank's times to microseconds on the clock of rank 0.
#[derive(Clone, Copy, Debug)]
struct Clock {
    anchor: Instant,
    anchor_us: f64,
}

impl Clock {
    fn here() -> Clock {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clock { anchor: Instant::now(), anchor_us: since_1970.as_secs_f64() * 1e6 }
    }

    /// A collective call.
    fn compared(engine: &Engine) -> Result<Clock, TrainError> {
        let clock = Clock::here();
        let mut ahead = Vec::with_capacity(CLOCK_ROUNDS);
        for _ in 0..CLOCK_ROUNDS {
            engine.barrier("comparing clocks")?;
            let clocks = engine.all_gather_f64("the clocks", &[clock.micros(Instant::now())])?;
            ahead.push(clocks[engine.rank().0 as usize][0] - clocks[0][0]);
        }
        ahead.sort_by(f64::total_cmp);
        let offset = ahead[CLOCK_ROUNDS / 2];
        let offset = if offset.abs() < CLOCK_ERROR_US { 0.0 } else { offset };
        Ok(Clock { anchor_us: clock.anchor_us - offset, ..clock })
    }

    fn micros(&self, at: Instant) -> f64 {
        let after = at.saturating_duration_since(self.anchor).as_secs_f64();
        let before = self.anchor.saturating_duration_since(at).as_secs_f64();
        self.anchor_us + (after - before) * 1e6
    }
}
