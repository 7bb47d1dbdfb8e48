//! `lockstep prepare`: tokenizes and packs the data of a run, and prints statistics and samples.

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::time::Instant;

use lockstep_config::{Purpose, RunConfig};
use lockstep_core::{Elems, Fault, FaultClass};
use lockstep_data::{DataError, Dataset, Tokenizer};
use serde_json::{Value, json};

use crate::args::Prepare;
use crate::hub::Need;
use crate::report::{self, Failure};
use crate::train::boxed;
use crate::{host, hub, inputs};

/// There is neither a shared cache nor an output folder.
#[derive(Debug)]
struct NoFolder;

impl std::fmt::Display for NoFolder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "there is no folder for prepared data: this user has no cache folder that can be written to"
        )
    }
}

impl std::error::Error for NoFolder {}

impl Fault for NoFolder {
    fn class(&self) -> FaultClass {
        FaultClass::CannotWrite
    }

    fn hint(&self) -> Option<String> {
        Some("Set data_cache_dir or output_dir to a folder that can be written to.".into())
    }
}

pub(crate) fn run(args: &Prepare) -> Result<(), Failure> {
    let (mut config, _) = inputs::load(Purpose::Prepare, &args.run.words(), &[])?;
    if config.data.data_cache_dir.is_none() && config.output.output_dir.as_os_str().is_empty() {
        return Err(Box::new(NoFolder));
    }
    hub::provide(&mut config, &mut String::new(), Need::Prepare)?;
    let mut tokenizer = lockstep_train::load_tokenizer(&config).map_err(boxed)?;
    let chat = lockstep_train::chat_encoder(&config, &mut tokenizer).map_err(boxed)?;
    let start = Instant::now();
    let train = lockstep_train::prepare_train(&config, &tokenizer, chat.as_ref()).map_err(boxed)?;
    let train = Prepared { name: "train", dataset: train, seconds: start.elapsed().as_secs_f64() };
    let start = Instant::now();
    let eval = lockstep_train::prepare_eval(&config, &tokenizer, chat.as_ref()).map_err(boxed)?;
    let eval = eval.map(|dataset| Prepared { name: "eval", dataset, seconds: start.elapsed().as_secs_f64() });
    let mut all = vec![train];
    all.extend(eval);
    let text = if args.json {
        as_json(&all, &tokenizer, args.samples).map_err(|e| -> Failure { Box::new(e) })?
    } else {
        let dim = std::io::stdout().is_terminal();
        as_text(&all, &config, &tokenizer, args.samples, dim).map_err(|e| -> Failure { Box::new(e) })?
    };
    report::print(&text)
}

/// A prepared data set, and the time it took.
struct Prepared {
    name: &'static str,
    dataset: Dataset,
    seconds: f64,
}

impl Prepared {
    fn tokens_per_second(&self) -> f64 {
        self.dataset.num_tokens() as f64 / self.seconds.max(1e-9)
    }
}

fn as_text(
    all: &[Prepared],
    config: &RunConfig,
    tokenizer: &Tokenizer,
    samples: usize,
    dim: bool,
) -> Result<String, DataError> {
    let mut text = String::new();
    for part in all {
        if all.len() > 1 {
            let _ = writeln!(text, "{}", part.name);
        }
        summary(&mut text, part, config.data.max_length);
        for row in sample_rows(&part.dataset, samples) {
            sample(&mut text, &part.dataset, row, tokenizer, dim)?;
        }
    }
    Ok(text)
}

fn summary(text: &mut String, part: &Prepared, max_length: u32) {
    let stats = part.dataset.stats();
    for note in part.dataset.notes() {
        let _ = writeln!(text, "{note}");
    }
    let path = part.dataset.path().display();
    let _ = if part.dataset.was_cached() {
        writeln!(text, "found {path} | prepared earlier")
    } else {
        let speed = Elems(part.tokens_per_second() as u64);
        writeln!(text, "prepared {path} | {:.2} s | {speed} tokens/s", part.seconds)
    };
    let _ = writeln!(
        text,
        "rows        {} read, {} bad and skipped, {} dropped: {} shorter than two tokens, {} without tokens in \
         the loss, {} too long",
        stats.read,
        stats.skipped,
        stats.dropped_short + stats.dropped_unsupervised + stats.dropped_long,
        stats.dropped_short,
        stats.dropped_unsupervised,
        stats.dropped_long,
    );
    for skipped in part.dataset.skipped().iter().take(3) {
        let why = skipped.why.lines().next().unwrap_or_default();
        let _ = writeln!(text, "  skipped   {} row {}: {why}", skipped.file.display(), skipped.row);
    }
    let _ = writeln!(
        text,
        "documents   {}, {} of them truncated | tokens: median {}, 90 % up to {}, 99 % up to {}, maximum {}",
        stats.docs, stats.truncated, stats.length_p50, stats.length_p90, stats.length_p99, stats.length_max,
    );
    if stats.prefix_mismatches > 0 {
        let _ = writeln!(
            text,
            "  note      in {} of them a token spans prompt and completion: the loss mask is off by one there",
            stats.prefix_mismatches
        );
    }
    let _ = writeln!(
        text,
        "packed      {} rows of up to {max_length} tokens, {} full",
        stats.rows,
        percent(stats.tokens, stats.capacity)
    );
    let _ = writeln!(
        text,
        "tokens      {}, {} in the loss",
        stats.tokens,
        percent(stats.supervised, stats.tokens)
    );
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", 100.0 * part as f64 / whole.max(1) as f64)
}

/// Sample rows, spread over the data set.
fn sample_rows(dataset: &Dataset, samples: usize) -> Vec<usize> {
    let rows = dataset.num_rows();
    let samples = samples.min(rows);
    (0..samples).map(|at| at * rows / samples).collect()
}

fn sample(
    text: &mut String,
    dataset: &Dataset,
    row: usize,
    tokenizer: &Tokenizer,
    dim: bool,
) -> Result<(), DataError> {
    let docs = dataset.row_docs(row);
    let tokens: usize = docs.iter().map(|doc| dataset.doc_len(*doc)).sum();
    let plural = if docs.len() == 1 { "document" } else { "documents" };
    let _ = writeln!(text, "\nrow {row}: {} {plural}, {tokens} tokens", docs.len());
    for (idx, doc) in docs.iter().enumerate() {
        if docs.len() > 1 {
            let _ =
                writeln!(text, "-- document {} of {}, {} tokens", idx + 1, docs.len(), dataset.doc_len(*doc));
        }
        for (run, learned) in runs(dataset, *doc, tokenizer)? {
            let shown: String = run
                .chars()
                .map(|c| if c.is_control() && !"\n\t".contains(c) { char::REPLACEMENT_CHARACTER } else { c })
                .collect();
            match (learned, dim) {
                (true, _) => text.push_str(&shown),
                (false, true) => text.push_str(&format!("\x1b[2m{shown}\x1b[0m")),
                (false, false) => text.push_str(&format!("⟦{shown}⟧")),
            }
        }
        text.push('\n');
    }
    Ok(())
}

/// A document as runs of text that are in the loss or not.
fn runs(dataset: &Dataset, doc: u32, tokenizer: &Tokenizer) -> Result<Vec<(String, bool)>, DataError> {
    let tokens = dataset.masked(doc)?;
    tokens
        .chunk_by(|a, b| a.1 == b.1)
        .map(|run| {
            let ids: Vec<u32> = run.iter().map(|(id, _)| *id).collect();
            Ok((tokenizer.decode(&ids, false)?, run[0].1))
        })
        .collect()
}

fn as_json(all: &[Prepared], tokenizer: &Tokenizer, samples: usize) -> Result<String, DataError> {
    let mut object = serde_json::Map::new();
    for part in all {
        let dataset = &part.dataset;
        let mut value = json!({
            "path": dataset.path().display().to_string(),
            "cached": dataset.was_cached(),
            "seconds": part.seconds,
            "tokens_per_second": (!dataset.was_cached()).then(|| part.tokens_per_second()),
            "fingerprint": dataset.fingerprint(),
            "notes": dataset.notes(),
        });
        for (name, count) in dataset.stats().pairs() {
            value[name] = count.into();
        }
        value["skipped_rows"] = dataset
            .skipped()
            .iter()
            .map(|row| json!({ "file": row.file.display().to_string(), "row": row.row, "why": row.why }))
            .collect();
        value["samples"] = sample_rows(dataset, samples)
            .into_iter()
            .map(|row| row_json(dataset, row, tokenizer))
            .collect::<Result<Vec<_>, _>>()?
            .into();
        object.insert(part.name.into(), value);
    }
    if let Some(peak) = host::peak_memory() {
        object.insert("peak_memory_bytes".into(), peak.0.into());
    }
    Ok(format!("{}\n", Value::Object(object)))
}

fn row_json(dataset: &Dataset, row: usize, tokenizer: &Tokenizer) -> Result<Value, DataError> {
    let doc = |doc: &u32| {
        let runs = runs(dataset, *doc, tokenizer)?;
        let runs: Vec<Value> =
            runs.into_iter().map(|(text, learned)| json!({ "text": text, "learned": learned })).collect();
        Ok(json!({ "tokens": dataset.doc_len(*doc), "runs": runs }))
    };
    let docs = dataset.row_docs(row).iter().map(doc).collect::<Result<Vec<_>, DataError>>()?;
    Ok(json!({ "row": row, "documents": docs }))
}
