//! Damage to a complete checkpoint is always detected and reported as bad data, and never causes a panic.

use std::fs;
use std::path::{Path, PathBuf};

use lockstep_ckpt::{Checkpoint, CkptError, latest};
use lockstep_core::rng::{Purpose, RngStream};
use lockstep_core::{Fault, FaultClass};

use crate::save;

fn files(path: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = path.read_dir().unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 3);
    files
}

fn refused(path: &Path, what: &str) -> CkptError {
    match Checkpoint::open_verified(path) {
        Ok(_) => panic!("not detected: {what}"),
        Err(e) => {
            assert!(matches!(e.class(), FaultClass::BadData | FaultClass::InputMissing), "{what}: {e}");
            e
        }
    }
}

#[test]
fn every_truncation_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 1);
    for file in files(&path) {
        let whole = fs::read(&file).unwrap();
        for len in 0..whole.len() {
            fs::write(&file, &whole[..len]).unwrap();
            let error = refused(&path, &format!("{} truncated to {len}", file.display()));
            assert_eq!(error.class(), FaultClass::BadData);
            // `latest` checks lengths too.
            assert_eq!(latest(dir.path()).unwrap().path, None);
        }
        fs::write(&file, [&whole[..], b"\0"].concat()).unwrap();
        refused(&path, "one extra byte");
        fs::write(&file, vec![0; whole.len()]).unwrap();
        refused(&path, "all zeros");
        fs::write(&file, whole).unwrap();
    }
    Checkpoint::open_verified(&path).unwrap();
}

#[test]
fn every_flipped_bit_is_detected() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 1);
    let stream = RngStream::new(5, Purpose::Sampling, 0, 0);
    for (idx, file) in files(&path).into_iter().enumerate() {
        let whole = fs::read(&file).unwrap();
        for flip in 0..500 {
            let bit = stream.below(idx as u32 * 500 + flip, whole.len() as u64 * 8) as usize;
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(&file, &bytes).unwrap();
            let error = refused(&path, &format!("bit {bit} of {}", file.display()));
            assert_eq!(error.class(), FaultClass::BadData);
        }
        fs::write(&file, whole).unwrap();
    }
    Checkpoint::open_verified(&path).unwrap();
}

#[test]
fn missing_extra_and_swapped_files_are_detected() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 1);
    let (model, optimizer) = (path.join("model.safetensors"), path.join("optimizer.safetensors"));
    let away = dir.path().join("away");

    fs::rename(&model, &away).unwrap();
    assert!(matches!(refused(&path, "missing"), CkptError::Missing { .. }));
    fs::create_dir(&model).unwrap();
    assert!(matches!(refused(&path, "a folder"), CkptError::WrongKind { .. }));
    fs::remove_dir(&model).unwrap();

    fs::rename(&optimizer, &model).unwrap();
    fs::rename(&away, &optimizer).unwrap();
    assert!(matches!(refused(&path, "swapped"), CkptError::Length { .. }));
    fs::rename(&optimizer, &away).unwrap();
    fs::rename(&model, &optimizer).unwrap();
    fs::rename(&away, &model).unwrap();

    // Same length, but the content of another step.
    let other = save(&dir.path().join("other"), 2);
    let mut bytes = fs::read(other.join("model.safetensors")).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x40;
    let whole = fs::read(&model).unwrap();
    fs::write(&model, bytes).unwrap();
    assert!(matches!(refused(&path, "swapped"), CkptError::Hash { .. }));
    fs::write(&model, whole).unwrap();

    fs::copy(&model, path.join("model-2.safetensors")).unwrap();
    assert!(matches!(refused(&path, "extra"), CkptError::ExtraFile { .. }));
    fs::remove_file(path.join("model-2.safetensors")).unwrap();
    fs::write(path.join("notes.txt"), "kept by the user").unwrap();
    Checkpoint::open_verified(&path).unwrap();

    fs::rename(&path, dir.path().join("step-2")).unwrap();
    assert!(matches!(refused(&dir.path().join("step-2"), "renamed"), CkptError::Manifest { .. }));
}
