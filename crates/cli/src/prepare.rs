//! `lockstep prepare`

use std::fmt::Write as _;
use std::io::IsTerminal as _;
use std::time::Instant;

use lockstep_config::RunConfig;
use lockstep_core::Elems;
use lockstep_data::{DataError, Dataset, Tokenizer};
use serde_json::{Value, json};

use crate::args::Prepare;
use crate::host;
use crate::report::{self, Failure};
use crate::train::boxed;

pub(crate) fn run(args: &Prepare) -> Result<(), Failure> {
    let (config, _) = report::load(&args.run.settings, &[])?;
    config.check_trainable().map_err(|e| -> Failure { Box::new(e) })?;
    let mut tokenizer = lockstep_train::load_tokenizer(&config).map_err(boxed)?;
    let chat = lockstep_train::chat_encoder(&config, &mut tokenizer).map_err(boxed)?;
    let start = Instant::now();
    let train = lockstep_train::prepare_train(&config, &tokenizer, chat.as_ref()).map_err(boxed)?;
    let train = Made { name: "train", dataset: train, seconds: start.elapsed().as_secs_f64() };
    let start = Instant::now();
    let eval = lockstep_train::prepare_eval(&config, &tokenizer, chat.as_ref()).map_err(boxed)?;
    let eval = eval.map(|dataset| Made { name: "eval", dataset, seconds: start.elapsed().as_secs_f64() });
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

/// A data set and how long it took.
struct Made {
    name: &'static str,
    dataset: Dataset,
    seconds: f64,
}

impl Made {
    fn tokens_per_second(&self) -> f64 {
        self.dataset.num_tokens() as f64 / self.seconds.max(1e-9)
    }
}

fn as_text(
    all: &[Made],
    config: &RunConfig,
    tokenizer: &Tokenizer,
    samples: usize,
    dim: bool,
) -> Result<String, DataError> {
    let mut text = String::new();
    for made in all {
        if all.len() > 1 {
            let _ = writeln!(text, "{}", made.name);
        }
        summary(&mut text, made, config.data.max_length);
        for row in chosen(&made.dataset, samples) {
            sample(&mut text, &made.dataset, row, tokenizer, dim)?;
        }
    }
    Ok(text)
}

fn summary(text: &mut String, made: &Made, max_length: u32) {
    let stats = made.dataset.stats();
    for note in made.dataset.notes() {
        let _ = writeln!(text, "{note}");
    }
    let path = made.dataset.path().display();
    let _ = if made.dataset.was_cached() {
        writeln!(text, "found {path} | prepared before")
    } else {
        let speed = Elems(made.tokens_per_second() as u64);
        writeln!(text, "prepared {path} | {:.2} s | {speed} tokens/s", made.seconds)
    };
    let _ = writeln!(
        text,
        "rows        {} read, {} bad and skipped, {} dropped: {} shorter than two tokens, {} with nothing to \
         learn, {} too long",
        stats.read,
        stats.skipped,
        stats.dropped_short + stats.dropped_unsupervised + stats.dropped_long,
        stats.dropped_short,
        stats.dropped_unsupervised,
        stats.dropped_long,
    );
    for skipped in made.dataset.skipped().iter().take(3) {
        let why = skipped.why.lines().next().unwrap_or_default();
        let _ = writeln!(text, "  skipped   {} row {}: {why}", skipped.file.display(), skipped.row);
    }
    let _ = writeln!(
        text,
        "documents   {}, {} of them cut | tokens: median {}, 90 % up to {}, 99 % up to {}, most {}",
        stats.docs, stats.truncated, stats.length_p50, stats.length_p90, stats.length_p99, stats.length_max,
    );
    if stats.prefix_mismatches > 0 {
        let _ = writeln!(
            text,
            "  note      in {} of them prompt and completion share a token: the mask's edge is off by one",
            stats.prefix_mismatches
        );
    }
    let _ = writeln!(
        text,
        "packed      {} rows of up to {max_length} tokens, {} full",
        stats.rows,
        percent(stats.tokens, stats.capacity)
    );
    let _ =
        writeln!(text, "tokens      {}, {} to learn", stats.tokens, percent(stats.supervised, stats.tokens));
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1} %", 100.0 * part as f64 / whole.max(1) as f64)
}

/// Rows spread over the data set.
fn chosen(dataset: &Dataset, samples: usize) -> Vec<usize> {
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
        for (part, learned) in runs(dataset, *doc, tokenizer)? {
            let shown: String = part
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

/// A document as runs of text that is learned and text that is not.
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

fn as_json(all: &[Made], tokenizer: &Tokenizer, samples: usize) -> Result<String, DataError> {
    let mut object = serde_json::Map::new();
    for made in all {
        let dataset = &made.dataset;
        let mut value = json!({
            "path": dataset.path().display().to_string(),
            "cached": dataset.was_cached(),
            "seconds": made.seconds,
            "tokens_per_second": (!dataset.was_cached()).then(|| made.tokens_per_second()),
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
        value["samples"] = chosen(dataset, samples)
            .into_iter()
            .map(|row| row_json(dataset, row, tokenizer))
            .collect::<Result<Vec<_>, _>>()?
            .into();
        object.insert(made.name.into(), value);
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
