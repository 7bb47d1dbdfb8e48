//! Writing, reading, verifying and retaining checkpoints.

use std::fs;

use lockstep_ckpt::{
    Checkpoint, CheckpointWriter, CkptError, Meta, PieceSpec, TensorBox, TensorPart, TensorSpec, latest,
    open_latest, retain,
};
use lockstep_core::{DType, Fault, FaultClass, Step};
use proptest::prelude::*;

use crate::{meta, save, source, states, value};

#[test]
fn a_checkpoint_reads_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(&dir.path().join("run"), 7);
    assert_eq!(path, dir.path().join("run/step-7"));
    let checkpoint = Checkpoint::open_verified(&path).unwrap();
    checkpoint.verify().unwrap();
    assert_eq!(checkpoint.meta(), &meta(7));
    assert_eq!(checkpoint.counter("tokens_seen").unwrap(), u64::MAX);
    assert!(matches!(checkpoint.counter("tokens"), Err(CkptError::NoCounter { .. })));
    assert_eq!(checkpoint.tensors().count(), 6);
    for spec in states().concat() {
        let elems = spec.elems();
        for (start, end) in [(0, elems), (1, elems - 1), (2, 2)] {
            let mut out = vec![0.0; end - start];
            checkpoint.read_f32(&spec.name, &spec.shape, start..end, &mut out).unwrap();
            let expected: Vec<f32> = (start..end).map(|e| value(&spec.name, e)).collect();
            assert_eq!(out, expected);
        }
    }
}

/// Format version 1 has neither the fingerprint of numbers nor the settings.
#[test]
fn format_version_1_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 7).join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut whole: serde_json::Value = serde_json::from_str(&text).unwrap();
    let manifest = whole["manifest"].as_object_mut().unwrap();
    for key in ["numbers", "settings"] {
        manifest.remove(key).expect("version 2 has it");
    }
    manifest["format"] = 1.into();
    let body = serde_json::to_string_pretty(manifest).unwrap();
    let hash = blake3::hash(body.as_bytes()).to_hex();
    fs::write(&path, format!("{{\n\"blake3\": \"{hash}\",\n\"manifest\": {body}\n}}\n")).unwrap();
    let checkpoint = Checkpoint::open_verified(path.parent().unwrap()).unwrap();
    let expected = Meta { numbers: Default::default(), settings: Default::default(), ..meta(7) };
    assert_eq!(checkpoint.meta(), &expected);
}

#[test]
fn large_tensors_are_written_in_chunks() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = [TensorSpec::new("model/a", [1000, 700]), TensorSpec::new("model/b", [3])];
    let mut largest = 0;
    let mut writer = CheckpointWriter::begin(dir.path(), Step(0)).unwrap();
    writer
        .write_shard("a.safetensors", &tensors, DType::F32, &mut |name, range, out| {
            largest = largest.max(out.len());
            source(name, range, out)
        })
        .unwrap();
    let path = writer.finish(meta(0)).unwrap();
    assert!(largest < 700_000);
    let checkpoint = Checkpoint::open_verified(&path).unwrap();
    let mut out = vec![0.0; 700_000];
    checkpoint.read_f32("model/a", &[1000, 700], 0..700_000, &mut out).unwrap();
    assert!(out.iter().enumerate().all(|(e, v)| *v == value("model/a", e)));
}

#[test]
fn a_writer_that_does_not_finish_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::begin(dir.path(), Step(1)).unwrap();
    writer.write_shard("a.safetensors", &[TensorSpec::new("model/a", [2])], DType::F32, &mut source).unwrap();
    assert!(dir.path().join("step-1.partial").exists());
    drop(writer);
    assert_eq!(dir.path().read_dir().unwrap().count(), 0);

    let mut writer = CheckpointWriter::begin(dir.path(), Step(1)).unwrap();
    let failed = writer.write_shard(
        "a.safetensors",
        &[TensorSpec::new("model/a", [2])],
        DType::F32,
        &mut |tensor, _, _| Err(CkptError::Source { tensor: tensor.into(), source: "device lost".into() }),
    );
    assert_eq!(failed.unwrap_err().to_string(), "cannot get the values of `model/a`: device lost");
}

#[test]
fn an_older_checkpoint_of_the_same_step_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 3);
    let mut writer = CheckpointWriter::begin(dir.path(), Step(3)).unwrap();
    writer
        .write_shard("new.safetensors", &[TensorSpec::new("model/x", [1])], DType::F32, &mut source)
        .unwrap();
    let path = writer.finish(meta(3)).unwrap();
    assert_eq!(Checkpoint::open_verified(&path).unwrap().tensors().count(), 1);
    assert_eq!(dir.path().read_dir().unwrap().count(), 1);
}

#[test]
fn shard_names_outside_the_folder_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::begin(dir.path(), Step(1)).unwrap();
    for name in ["../a.safetensors", "/a.safetensors", "manifest.json", "a/b.safetensors", ""] {
        let error = writer.write_shard(name, &[], DType::F32, &mut source).unwrap_err();
        assert!(matches!(error, CkptError::FileName { .. }), "{name}");
    }
    writer.write_shard("a.safetensors", &[], DType::F32, &mut source).unwrap();
    assert!(writer.write_shard("a.safetensors", &[], DType::F32, &mut source).is_err());
    let unwritable = writer.write_shard("b.safetensors", &[], DType::U32, &mut source).unwrap_err();
    assert_eq!(unwritable.class(), FaultClass::BadConfig);
}

#[test]
fn latest_is_the_highest_complete_step() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("run");
    assert_eq!(latest(&root).unwrap().path, None);
    for step in [9, 10, 100] {
        save(&root, step);
    }
    let answer = latest(&root).unwrap();
    assert_eq!(answer.path, Some(root.join("step-100")));
    assert_eq!(answer.earlier, [root.join("step-10"), root.join("step-9")]);
    // Truncated later, never finished, renamed, and not a checkpoint at all.
    fs::File::options()
        .write(true)
        .open(root.join("step-100/model.safetensors"))
        .unwrap()
        .set_len(10)
        .unwrap();
    fs::create_dir(root.join("step-999")).unwrap();
    fs::create_dir(root.join("step-007")).unwrap();
    fs::create_dir(root.join("logs")).unwrap();
    save(&dir.path().join("other"), 5);
    fs::rename(dir.path().join("other/step-5"), root.join("step-500")).unwrap();
    fs::rename(root.join("step-10"), root.join("step-1000.partial")).unwrap();
    let answer = latest(&root).unwrap();
    assert_eq!(answer.path, Some(root.join("step-9")));
    let skipped: Vec<String> =
        answer.skipped.iter().map(|s| s.path.file_name().unwrap().to_string_lossy().into_owned()).collect();
    assert_eq!(skipped, ["step-999", "step-500", "step-100"]);
}

#[test]
fn open_latest_falls_back_to_the_last_checkpoint_that_verifies() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1);
    let newer = save(dir.path(), 2).join("optimizer.safetensors");
    let mut bytes = fs::read(&newer).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&newer, bytes).unwrap();
    assert_eq!(latest(dir.path()).unwrap().path, Some(dir.path().join("step-2")));
    let (checkpoint, skipped) = open_latest(dir.path()).unwrap();
    assert_eq!(checkpoint.unwrap().step(), Step(1));
    assert!(matches!(skipped[0].why, CkptError::Hash { .. }));
    assert_eq!(skipped[0].why.class(), FaultClass::BadData);
}

#[test]
fn retention_never_deletes_the_last_complete_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    for step in 1..=5 {
        save(root, step);
    }
    // Damaged checkpoints are not counted.
    fs::remove_file(root.join("step-5/manifest.json")).unwrap();
    fs::create_dir(root.join("step-0.trash")).unwrap();
    assert_eq!(retain(root, 2, None).unwrap(), [root.join("step-1"), root.join("step-2")]);
    assert!(!root.join("step-0.trash").exists() && root.join("step-5").exists());
    assert_eq!(retain(root, 0, None).unwrap(), [root.join("step-3")]);
    assert_eq!(retain(root, 0, None).unwrap(), Vec::<std::path::PathBuf>::new());
    assert_eq!(latest(root).unwrap().path, Some(root.join("step-4")));
    assert!(retain(&root.join("nowhere"), 3, None).unwrap().is_empty());
}

#[test]
fn retention_keeps_the_best_and_the_newest() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let paths = |steps: &[u64]| steps.iter().map(|s| root.join(format!("step-{s}"))).collect::<Vec<_>>();
    (1..=5).for_each(|step| drop(save(root, step)));
    assert_eq!(retain(root, 3, Some(Step(2))).unwrap(), paths(&[1, 3]));
    assert_eq!(retain(root, 1, Some(Step(2))).unwrap(), paths(&[4]));
    save(root, 6);
    // With a new best step, the old one may be deleted.
    assert_eq!(retain(root, 1, Some(Step(6))).unwrap(), paths(&[2, 5]));
    assert_eq!(retain(root, 1, Some(Step(99))).unwrap(), paths(&[]));
}

#[test]
fn other_files_are_verified_like_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = CheckpointWriter::begin(dir.path(), Step(3)).unwrap();
    writer.write_file("config.json", b"{}").unwrap();
    let template = "additional_chat_templates/rag.jinja";
    writer.write_file(template, b"{{ messages }}").unwrap();
    for bad in [
        "config.json",
        template,
        "manifest.json",
        "../a.json",
        "a.safetensors",
        "additional_chat_templates",
        "additional_chat_templates/../a.json",
        "additional_chat_templates/a/b",
        "other/a.json",
    ] {
        assert!(matches!(writer.write_file(bad, b""), Err(CkptError::FileName { .. })), "{bad}");
    }
    let meta = Checkpoint::open(&save(&dir.path().join("other"), 3)).unwrap().meta().clone();
    let path = writer.finish(meta).unwrap();
    let checkpoint = Checkpoint::open_verified(&path).unwrap();
    assert_eq!(checkpoint.other_files().collect::<Vec<_>>(), ["config.json", template]);
    assert_eq!(checkpoint.read_file(template).unwrap(), Some(b"{{ messages }}".to_vec()));
    assert_eq!(checkpoint.read_file("config.json").unwrap(), Some(b"{}".to_vec()));
    assert_eq!(checkpoint.read_file("absent.json").unwrap(), None);
    fs::write(path.join("config.json"), "[]").unwrap();
    assert!(matches!(checkpoint.read_file("config.json"), Err(CkptError::Hash { .. })));
    assert!(matches!(Checkpoint::open_verified(&path), Err(CkptError::Hash { .. })));
}

/// The largest number of ranks in the design, each with its part of the tensor, in a few files.
#[test]
fn a_tensor_in_ten_thousand_pieces_reads_back() {
    const RANKS: usize = 10_000;
    const FILES: usize = 8;
    let dir = tempfile::tempdir().unwrap();
    let shape = vec![1500, 20];
    let elems = |rank: usize| rank * 3..(rank + 1) * 3;
    let mut first = CheckpointWriter::begin(dir.path(), Step(1)).unwrap();
    for file in 0..FILES {
        let parts = (0..RANKS).filter(|rank| rank % FILES == file).map(elems);
        let parts: Vec<TensorBox> = parts.flat_map(|range| TensorBox::of_range(&shape, range)).collect();
        let spec =
            |part: &TensorBox| PieceSpec { name: "model/w".into(), shape: shape.clone(), part: part.clone() };
        let pieces: Vec<PieceSpec> = parts.iter().map(spec).collect();
        let mut writer = CheckpointWriter::join(dir.path(), Step(1));
        writer
            .write_pieces(
                &format!("model-{file}.safetensors"),
                &pieces,
                DType::F32,
                &mut |idx, range, out| {
                    for (slot, elem) in out.iter_mut().zip(range) {
                        *slot = flat(&parts[idx], &shape, elem) as f32;
                    }
                    Ok(())
                },
            )
            .unwrap();
        first.add_share(&writer.share().unwrap()).unwrap();
    }
    let path = first.finish(meta(1)).unwrap();
    let checkpoint = Checkpoint::open_verified(&path).unwrap();
    let mut out = vec![-1.0; RANKS * 3];
    checkpoint.read_f32("model/w", &shape, 0..RANKS * 3, &mut out).unwrap();
    assert!(out.iter().enumerate().all(|(at, value)| *value == at as f32));
}

#[test]
fn reading_a_part_opens_only_the_files_that_hold_it() {
    let dir = tempfile::tempdir().unwrap();
    let shape = vec![64, 32];
    let mut writer = CheckpointWriter::begin(dir.path(), Step(1)).unwrap();
    for rank in 0..4 {
        let part = TensorBox { start: vec![rank * 16, 0], extent: vec![16, 32] };
        let piece = PieceSpec { name: "model/w".into(), shape: shape.clone(), part };
        writer
            .write_pieces(&format!("{rank}.safetensors"), &[piece], DType::BF16, &mut |_, range, out| {
                out.iter_mut().zip(range).for_each(|(slot, elem)| *slot = ((rank * 512 + elem) / 8) as f32);
                Ok(())
            })
            .unwrap();
    }
    let path = writer.finish(meta(1)).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for absent in [0, 3] {
        fs::remove_file(path.join(format!("{absent}.safetensors"))).unwrap();
    }
    let part = TensorPart { name: "model/w".into(), shape, elems: 600..1400 };
    let mut found = vec![-1.0; 800];
    checkpoint
        .read_parts::<CkptError>(&[part], |index, range, values| {
            assert_eq!(index, 0);
            found[range.start - 600..range.end - 600].copy_from_slice(values);
            Ok(())
        })
        .unwrap();
    assert!(found.iter().zip(600..).all(|(value, elem)| *value == (elem / 8) as f32));
    let header = fs::metadata(path.join("1.safetensors")).unwrap().len() - 1024;
    assert_eq!(checkpoint.bytes_read().0, 800 * 2 + 2 * header);
    assert_eq!(checkpoint.bytes_verified().0, 0);
}

#[test]
fn ranks_verify_each_file_once_and_one_of_them_detects_the_damage() {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), 1);
    let all: u64 = ["model", "optimizer"]
        .map(|n| fs::metadata(path.join(format!("{n}.safetensors"))).unwrap().len())
        .iter()
        .sum();
    let ranks = || (0..3).map(|_| Checkpoint::open(&path).unwrap()).collect::<Vec<_>>();
    let sound = ranks();
    sound.iter().enumerate().for_each(|(rank, checkpoint)| checkpoint.verify_share(rank, 3).unwrap());
    assert_eq!(sound.iter().map(|c| c.bytes_verified().0).sum::<u64>(), all);
    assert!(
        sound.iter().all(|c| c.bytes_verified().0 < all && c.manifest_hash() == sound[0].manifest_hash())
    );
    let damaged = path.join("optimizer.safetensors");
    let mut bytes = fs::read(&damaged).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&damaged, bytes).unwrap();
    let found: Vec<_> =
        ranks().iter().enumerate().filter_map(|(rank, c)| c.verify_share(rank, 3).err()).collect();
    assert_eq!(found.len(), 1);
    assert!(matches!(&found[0].error, CkptError::Hash { file, .. } if *file == damaged));
}

/// Splits a tensor into boxes, by splitting one box after the other.
fn split(shape: &[usize], cuts: &[(usize, usize)]) -> Vec<TensorBox> {
    let mut boxes = vec![TensorBox::whole(shape)];
    for (dim, at) in cuts {
        let (dim, mut part) = (dim % shape.len(), boxes.remove(0));
        let first = at % (part.extent[dim] + 1);
        let mut rest = part.clone();
        rest.start[dim] += first;
        rest.extent[dim] -= first;
        part.extent[dim] = first;
        boxes.extend([part, rest].into_iter().filter(|b| b.elems() > 0));
    }
    boxes
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn a_tensor_in_any_pieces_reads_as_a_whole(
        shape in prop::collection::vec(1usize..6, 1..4),
        cuts in prop::collection::vec((0usize..3, 0usize..6), 0..6),
        from in 0usize..200, len in 0usize..200,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let name = "model/w".to_string();
        let pieces: Vec<PieceSpec> = split(&shape, &cuts)
            .into_iter()
            .map(|part| PieceSpec { name: name.clone(), shape: shape.clone(), part })
            .collect();
        let mut writer = CheckpointWriter::begin(dir.path(), Step(1)).unwrap();
        // Two files, as two ranks would write.
        for (file, pieces) in ["a.safetensors", "b.safetensors"].iter().zip(pieces.chunks(pieces.len().div_ceil(2))) {
            writer.write_pieces(file, pieces, DType::F32, &mut |idx, range, out| {
                for (slot, elem) in out.iter_mut().zip(range) {
                    *slot = flat(&pieces[idx].part, &shape, elem) as f32;
                }
                Ok(())
            }).unwrap();
        }
        let checkpoint = Checkpoint::open_verified(&writer.finish(meta(1)).unwrap()).unwrap();
        let total: usize = shape.iter().product();
        let range = from.min(total)..(from + len).min(total);
        let mut out = vec![-1.0; range.len()];
        checkpoint.read_f32(&name, &shape, range.clone(), &mut out).unwrap();
        prop_assert_eq!(&out, &range.clone().map(|e| e as f32).collect::<Vec<_>>());
        let part = TensorPart { name, shape, elems: range.clone() };
        let mut by_parts = vec![-1.0; range.len()];
        checkpoint.read_parts::<CkptError>(&[part], |_, at, values| {
            by_parts[at.start - range.start..at.end - range.start].copy_from_slice(values);
            Ok(())
        }).unwrap();
        prop_assert_eq!(by_parts, out);
    }
}

/// The flat index in the whole tensor of element `elem` of a piece.
fn flat(part: &TensorBox, shape: &[usize], elem: usize) -> usize {
    let (mut rest, mut at, mut stride) = (elem, 0, 1);
    for d in (0..shape.len()).rev() {
        at += (part.start[d] + rest % part.extent[d]) * stride;
        rest /= part.extent[d];
        stride *= shape[d];
    }
    at
}
