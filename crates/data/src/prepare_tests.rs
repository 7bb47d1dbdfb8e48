use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use super::*;
use crate::{Chat, Packing, TokenizerSource};

fn rows(count: usize) -> String {
    (0..count).map(|i| format!("{{\"text\": \"{}\"}}\n", "x".repeat(i % 90))).collect()
}

fn byte() -> Tokenizer {
    Tokenizer::load(&TokenizerSource::Byte).unwrap()
}

#[test]
fn the_result_does_not_depend_on_the_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.jsonl");
    fs::write(&file, rows(5000) + "not json\n{\"text\": 1}\n").unwrap();
    let on = |threads: usize, on_bad_row| {
        let cache = dir.path().join(threads.to_string());
        let spec = DataSpec {
            max_length: 64,
            packing: Packing::Bfd,
            on_bad_row,
            ..DataSpec::new(vec![file.clone()], &cache)
        };
        let prepared = prepare_on(threads, Encoder { spec: &spec, tokenizer: &byte(), chat: None });
        fs::remove_dir_all(&cache).ok();
        prepared
    };
    let one = on(1, OnBadRow::Skip).unwrap();
    for threads in [2, 3, 8] {
        let many = on(threads, OnBadRow::Skip).unwrap();
        assert_eq!(many.fingerprint(), one.fingerprint());
        assert_eq!(many.stats(), one.stats());
        assert_eq!(many.skipped(), one.skipped());
    }
    for threads in [1, 2, 8] {
        let error = on(threads, OnBadRow::Stop).unwrap_err();
        assert!(matches!(error, DataError::BadRow { row: 5001, .. }), "{error}");
    }
}

/// Other runs find the data wherever its file is, and only if the content and the format are the same.
#[test]
fn prepared_data_is_found_by_content() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let found = |name: &str| {
        prepare(&DataSpec::new(vec![path(name)], &path("cache")), &byte(), None).unwrap().was_cached()
    };
    fs::create_dir(path("elsewhere")).unwrap();
    fs::write(path("a.jsonl"), rows(10)).unwrap();
    assert!(!found("a.jsonl"));
    fs::rename(path("a.jsonl"), path("elsewhere/b.jsonl")).unwrap();
    assert!(found("elsewhere/b.jsonl"));
    fs::copy(path("elsewhere/b.jsonl"), path("b.txt")).unwrap();
    assert!(!found("b.txt"), "the same bytes as lines of text are other data");
    fs::write(path("elsewhere/b.jsonl"), rows(11)).unwrap();
    assert!(!found("elsewhere/b.jsonl"));
}

#[test]
fn prepared_data_is_reused_and_rebuilt_when_changed_or_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let (file, cache) = (dir.path().join("a.jsonl"), dir.path().join("deep/cache"));
    fs::write(&file, rows(100) + "{\"text\": 1}\n").unwrap();
    let mut spec = DataSpec { on_bad_row: OnBadRow::Skip, ..DataSpec::new(vec![file.clone()], &cache) };
    let prepared = |spec: &DataSpec| prepare(spec, &byte(), None).unwrap();
    let first = prepared(&spec);
    assert!(!first.was_cached());
    let second = prepared(&spec);
    assert!(second.was_cached() && second.notes().is_empty());
    assert_eq!((second.fingerprint(), second.stats()), (first.fingerprint(), first.stats()));
    assert_eq!(second.skipped(), first.skipped());
    assert_eq!(second.doc(7).unwrap(), first.doc(7).unwrap());
    // Only the prepared file remains: no lock and no partial file.
    assert_eq!(fs::read_dir(&cache).unwrap().count(), 1);

    spec.max_length = 20;
    assert!(!prepared(&spec).was_cached());
    spec.max_length = 1024;
    fs::write(&file, rows(101)).unwrap();
    let changed = prepared(&spec);
    assert!(!changed.was_cached() && changed.fingerprint() != first.fingerprint());

    let whole = fs::read(changed.path()).unwrap();
    let index_at = whole.len() - 300;
    let damage: [&dyn Fn() -> Vec<u8>; 5] = [
        &|| whole[..whole.len() - 1].to_vec(),
        &|| whole[..whole.len() / 2].to_vec(),
        &|| Vec::new(),
        &|| [&whole[..index_at], &[!whole[index_at]], &whole[index_at + 1..]].concat(),
        &|| [&[0u8; 4], &whole[..]].concat(),
    ];
    for (case, damaged) in damage.iter().enumerate() {
        fs::write(changed.path(), damaged()).unwrap();
        let rebuilt = prepared(&spec);
        assert!(rebuilt.notes()[0].contains("is damaged"), "{case}: {:?}", rebuilt.notes());
        assert_eq!(rebuilt.fingerprint(), changed.fingerprint());
        assert_eq!(fs::read(changed.path()).unwrap(), whole);
    }
}

#[test]
fn a_failure_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.jsonl");
    fs::write(&file, rows(5) + "x\n").unwrap();
    let spec = DataSpec::new(vec![file], &dir.path().join("made/for/it"));
    assert!(prepare(&spec, &byte(), None).is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// Counts the conversations that it renders, to show whether work was done twice.
struct CountingEncoder(AtomicUsize);

impl EncodeChat for CountingEncoder {
    fn fingerprint(&self) -> String {
        "counted".into()
    }

    fn conversation(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<crate::EncodedChat, RowFault> {
        self.0.fetch_add(1, Ordering::SeqCst);
        thread::sleep(std::time::Duration::from_millis(1));
        let text = chat.messages[0]["content"].as_str().unwrap_or_default();
        let tokens = tokenizer.encode(text).map_err(|e| RowFault::Template { why: e.to_string() })?;
        let supervised = (0..tokens.len()).map(|t| t % 2 == 1).collect();
        Ok(crate::EncodedChat { tokens, supervised, prefix_mismatch: false })
    }

    fn prompt(&self, tokenizer: &Tokenizer, chat: &Chat) -> Result<Vec<u32>, RowFault> {
        self.conversation(tokenizer, chat).map(|encoded| encoded.tokens)
    }

    fn pair(&self, _: &Tokenizer, _: &Chat, _: &[Value], _: bool) -> Result<crate::EncodedChat, RowFault> {
        Err(RowFault::Template { why: "no pairs".into() })
    }
}

#[test]
fn concurrent_callers_prepare_the_data_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a.jsonl");
    let row = "{\"messages\": [{\"role\": \"user\", \"content\": \"hello\"}]}\n";
    fs::write(&file, row.repeat(60)).unwrap();
    let spec = DataSpec::new(vec![file], &dir.path().join("cache"));
    let chat = CountingEncoder(AtomicUsize::new(0));
    let fingerprints: Vec<String> = thread::scope(|scope| {
        let many =
            (0..6).map(|_| scope.spawn(|| prepare(&spec, &byte(), Some(&chat)).unwrap().fingerprint()));
        many.collect::<Vec<_>>().into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(fingerprints.iter().all(|fingerprint| *fingerprint == fingerprints[0]));
    assert_eq!(chat.0.load(Ordering::SeqCst), 60);
    assert_eq!(fs::read_dir(&spec.cache_dir).unwrap().count(), 1);
    let dataset = prepare(&spec, &byte(), Some(&chat)).unwrap();
    assert_eq!(dataset.doc(0).unwrap().1, [false, true, false, true, false]);
    let error = prepare(&spec, &byte(), None).unwrap_err();
    assert!(matches!(error, DataError::BadRow { fault: RowFault::NoTemplate { .. }, .. }), "{error}");
}
