//! Chooses the checkpoint to resume from: rank 0 finds candidates, and all ranks verify them and agree on one.
//!
//! Every rank opens the manifest and verifies its share of the files. The ranks then exchange their results, so that
//! all resume from the same checkpoint, skip the same damaged ones, or fail with the same error. Every byte that a rank
//! loads afterwards has been verified by one of them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{Checkpoint, Damage};
use lockstep_config::Resume;
use lockstep_core::{Bytes, Fault, FaultClass};
use lockstep_engine::Engine;
use serde_json::{Value, json};

use crate::error::TrainError;
use crate::numerics::NumericsFingerprint;
use crate::save::RunIdentity;

/// The checkpoints that a run may resume from. Only rank 0 looks for them.
#[derive(Debug, Default)]
pub(crate) struct ResumeCandidates {
    /// Newest first. Only the first one was checked, and only its manifest and the sizes of its files.
    paths: Vec<PathBuf>,
    /// What is wrong with the newest checkpoint, if it is damaged and therefore not in `paths`.
    newest_damage: String,
}

impl ResumeCandidates {
    /// Finds checkpoints without reading their tensors. Damaged ones are skipped and reported through `note`.
    pub(crate) fn find(
        resume: &Resume,
        root: &Path,
        note: &mut dyn FnMut(&str),
    ) -> Result<ResumeCandidates, TrainError> {
        let root = match (folder_of(resume, root), resume) {
            (Some(root), _) => root,
            (None, Resume::Path(path)) if !path.exists() => {
                return Err(TrainError::NothingToResume { dir: path.clone() });
            }
            (None, Resume::Path(path)) => {
                Checkpoint::open(path)?;
                return Ok(ResumeCandidates { paths: vec![path.clone()], newest_damage: String::new() });
            }
            (None, _) => return Ok(ResumeCandidates::default()),
        };
        let found = lockstep_ckpt::latest(&root)?;
        for damaged in &found.skipped {
            note(&skipped_note(&damaged.why));
        }
        let newest_damage = found.skipped.first().map_or(String::new(), |damaged| damaged.why.to_string());
        match found.path {
            Some(path) => Ok(ResumeCandidates { paths: [vec![path], found.earlier].concat(), newest_damage }),
            None if newest_damage.is_empty() && *resume == Resume::Auto => {
                let dir = root.display();
                note(&format!(
                    "resume_from_checkpoint: auto: no checkpoint in {dir}; starting from the beginning"
                ));
                Ok(ResumeCandidates::default())
            }
            None if newest_damage.is_empty() => Err(TrainError::NothingToResume { dir: root }),
            None => Err(TrainError::AllDamaged { dir: root, why: newest_damage }),
        }
    }

    fn to_bytes(&self) -> Vec<u8> {
        let parts =
            [OsStr::new(&self.newest_damage)].into_iter().chain(self.paths.iter().map(|p| p.as_os_str()));
        parts.map(OsStrExt::as_bytes).collect::<Vec<_>>().join(&0)
    }

    fn from_bytes(bytes: &[u8]) -> ResumeCandidates {
        let mut parts = bytes.split(|byte| *byte == 0);
        let newest_damage = String::from_utf8_lossy(parts.next().unwrap_or_default()).into_owned();
        ResumeCandidates {
            paths: parts.map(|path| PathBuf::from(OsStr::from_bytes(path))).collect(),
            newest_damage,
        }
    }
}

/// Opens the checkpoint that all ranks resume from: the newest of rank 0's candidates that all ranks find intact. A
/// collective call. `None`: the run starts from the beginning.
pub(crate) fn open_agreed(
    engine: &Engine,
    resume: &Resume,
    root: &Path,
    candidates: &ResumeCandidates,
    note: &mut dyn FnMut(&str),
) -> Result<Option<Checkpoint>, TrainError> {
    if *resume == Resume::No {
        return Ok(None);
    }
    let of_rank_0 =
        engine.all_gather_bytes("checkpoints to resume from", &candidates.to_bytes())?.swap_remove(0);
    let ResumeCandidates { paths, mut newest_damage } = ResumeCandidates::from_bytes(&of_rank_0);
    if *resume == Resume::Auto && paths.is_empty() {
        return Ok(None);
    }
    let root = folder_of(resume, root);
    for path in paths {
        match (verify_on_all_ranks(engine, &path)?, &root) {
            (Ok(checkpoint), _) => return Ok(Some(checkpoint)),
            (Err(damage), None) => return Err(damage.into()),
            (Err(damage), Some(_)) => {
                note(&skipped_note(&damage.why));
                if newest_damage.is_empty() {
                    newest_damage = damage.why;
                }
            }
        }
    }
    let dir = root.unwrap_or_default();
    Err(TrainError::AllDamaged { dir, why: newest_damage })
}

/// Opens a checkpoint that must be intact. A collective call.
pub(crate) fn open_intact(engine: &Engine, path: &Path) -> Result<Checkpoint, TrainError> {
    verify_on_all_ranks(engine, path)?.map_err(TrainError::from)
}

/// The settings and the fields of the numerics fingerprint that have changed since the checkpoint, one line each. Empty
/// for checkpoints that do not record them.
pub(crate) fn changes_since(checkpoint: &Checkpoint, identity: &RunIdentity) -> Vec<String> {
    let meta = checkpoint.meta();
    let mut changes = Vec::new();
    if !meta.settings.is_empty() {
        let changed = lockstep_config::changed_settings(&meta.settings, &identity.settings);
        changes
            .extend(changed.iter().map(|change| format!("setting changed since the checkpoint: {change}")));
    }
    if !meta.numbers.fields.is_empty() {
        let then = NumericsFingerprint::from_fields(meta.numbers.fields.clone());
        let changed = identity.numerics.differences(&then);
        changes.extend(
            changed.iter().map(|change| format!("fingerprint changed since the checkpoint: {change}")),
        );
    }
    changes
}

/// The folder whose newest checkpoint to resume from. `None`: a specific checkpoint is given, or none.
fn folder_of(resume: &Resume, root: &Path) -> Option<PathBuf> {
    match resume {
        Resume::Latest | Resume::Auto => Some(root.to_path_buf()),
        Resume::Path(path) if path.file_name().is_some_and(|n| n == "latest") => {
            Some(path.parent().unwrap_or(path).to_path_buf())
        }
        Resume::Path(_) | Resume::No => None,
    }
}

pub(crate) fn skipped_note(why: &dyn std::fmt::Display) -> String {
    format!("skipped a damaged checkpoint: {why}")
}

/// Damage to a checkpoint, with the same message on all ranks.
#[derive(Clone, Debug)]
struct SharedDamage {
    why: String,
    hint: Option<String>,
    class: FaultClass,
}

impl From<SharedDamage> for TrainError {
    fn from(damage: SharedDamage) -> TrainError {
        let SharedDamage { why, hint, class } = damage;
        TrainError::DamagedCheckpoint { why, hint, class }
    }
}

/// Every rank verifies its share of the files; all ranks return the same result.
fn verify_on_all_ranks(engine: &Engine, path: &Path) -> Result<Result<Checkpoint, SharedDamage>, TrainError> {
    let (rank, world) = (engine.rank().0 as usize, engine.plan().input.mesh.world_size() as usize);
    let mine = Checkpoint::open(path).map_err(|error| Damage { order: 0, error });
    let mine = mine.and_then(|checkpoint| checkpoint.verify_share(rank, world).map(|()| checkpoint));
    let report = match &mine {
        Ok(checkpoint) => json!({ "manifest": checkpoint.manifest_hash() }),
        Err(Damage { order, error }) => json!({
            "order": order,
            "why": error.to_string(),
            "hint": error.hint(),
            "missing": error.class() == FaultClass::InputMissing,
        }),
    };
    let reports = engine.all_gather_bytes("verifying the checkpoint", report.to_string().as_bytes())?;
    let reports: Vec<Value> =
        reports.iter().map(|bytes| serde_json::from_slice(bytes).unwrap_or_default()).collect();
    match (mine, first_damage(path, &reports)) {
        (Ok(checkpoint), None) => Ok(Ok(checkpoint)),
        (_, Some(damage)) => Ok(Err(damage)),
        (Err(Damage { error, .. }), None) => Err(error.into()),
    }
}

/// The first damage that any rank reports, including ranks that read different manifests.
fn first_damage(path: &Path, reports: &[Value]) -> Option<SharedDamage> {
    let damaged = reports.iter().filter(|report| report.get("why").is_some());
    if let Some(first) = damaged.min_by_key(|report| report["order"].as_u64()) {
        let class = if first["missing"] == true { FaultClass::InputMissing } else { FaultClass::BadData };
        let text = |key: &str| first[key].as_str().map(str::to_string);
        return Some(SharedDamage { why: text("why").unwrap_or_default(), hint: text("hint"), class });
    }
    let other = reports.iter().position(|report| report["manifest"] != reports[0]["manifest"])?;
    Some(SharedDamage {
        why: format!("{}: rank 0 and rank {other} read different manifests", path.display()),
        hint: Some("All ranks must see the same files: put output_dir on a shared file system.".into()),
        class: FaultClass::BadData,
    })
}

/// The bytes that all ranks read from files before the first step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BytesLoaded {
    read: Bytes,
    /// Bytes that were hashed to verify files, in addition to `read`.
    verified: Bytes,
}

impl BytesLoaded {
    /// Sums the bytes of all ranks. A collective call. `None`: nothing was read. `from_folders`: the bytes that this rank
    /// read from model folders.
    pub(crate) fn of_all(
        engine: &Engine,
        checkpoint: Option<&Checkpoint>,
        from_folders: Bytes,
    ) -> Result<Option<BytesLoaded>, TrainError> {
        let mine = match checkpoint {
            Some(checkpoint) => [checkpoint.bytes_read() + from_folders, checkpoint.bytes_verified()],
            None => [from_folders, Bytes::ZERO],
        };
        let mine: Vec<u8> = mine.iter().flat_map(|bytes| bytes.0.to_le_bytes()).collect();
        let all = engine.all_gather_bytes("the start", &mine)?;
        let mut sums = [0u64; 2];
        for (sum, at) in sums.iter_mut().zip([0, 8]) {
            let number = |bytes: &Vec<u8>| bytes[at..at + 8].try_into().map(u64::from_le_bytes).unwrap_or(0);
            *sum = all.iter().map(number).sum();
        }
        let loaded = BytesLoaded { read: Bytes(sums[0]), verified: Bytes(sums[1]) };
        Ok((loaded != BytesLoaded::default()).then_some(loaded))
    }

    /// The line for the log, with exact numbers.
    pub(crate) fn log_line(&self) -> String {
        format!("loading: all ranks read {} bytes and verified {} bytes", self.read.0, self.verified.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_round_trip_through_bytes() {
        for (paths, newest_damage) in [(vec![], ""), (vec!["a b/step-3", "ü/step-1"], "step-4 is corrupt")] {
            let paths: Vec<PathBuf> = paths.into_iter().map(PathBuf::from).collect();
            let sent = ResumeCandidates { paths: paths.clone(), newest_damage: newest_damage.into() };
            let got = ResumeCandidates::from_bytes(&sent.to_bytes());
            assert_eq!((got.paths, got.newest_damage.as_str()), (paths, newest_damage));
        }
    }

    #[test]
    fn all_ranks_report_the_first_damage() {
        let intact = || json!({ "manifest": "a" });
        let path = Path::new("step-1");
        assert!(first_damage(path, &[intact(), intact()]).is_none());
        let damage = |order: u64| json!({ "order": order, "why": format!("file {order}"), "missing": false });
        let found = first_damage(path, &[intact(), damage(7), damage(2), intact()]).unwrap();
        assert_eq!((found.why.as_str(), found.class), ("file 2", FaultClass::BadData));
        let differ = first_damage(path, &[intact(), intact(), json!({ "manifest": "b" })]).unwrap();
        assert_eq!(differ.why, "step-1: rank 0 and rank 2 read different manifests");
    }
}
