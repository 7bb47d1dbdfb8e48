//! `lockstep generate`: generates text from prompts.

use std::io::{IsTerminal, Read as _};
use std::path::{Path, PathBuf};

use lockstep_core::{Bytes, DType, Fault, FaultClass};
use lockstep_data::Tokenizer;
use lockstep_device::Machine;
use lockstep_train::generate::{
    Completion, FinishReason, Generator, GeneratorSpec, SampledToken, SamplingParams, StopStrings, TextStream,
};
use serde_json::{Value, json};

use crate::args::{Generate, Model, SamplingFlags};
use crate::report::{self, Failure};
use crate::train::boxed;
use crate::{gpu, hub};

/// There are no usable prompts.
#[derive(Debug)]
enum PromptError {
    None,
    File { path: PathBuf, cause: std::io::Error },
    Row { path: PathBuf, row: usize, why: String },
}

impl std::fmt::Display for PromptError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            PromptError::None => write!(f, "there is no prompt"),
            PromptError::File { path, cause } => {
                write!(f, "cannot read the prompts in {}: {cause}", path.display())
            }
            PromptError::Row { path, row, why } => write!(f, "{} row {row}: {why}", path.display()),
        }
    }
}

impl std::error::Error for PromptError {}

impl Fault for PromptError {
    fn class(&self) -> FaultClass {
        match self {
            PromptError::None => FaultClass::BadConfig,
            PromptError::File { .. } => FaultClass::InputMissing,
            PromptError::Row { .. } => FaultClass::BadData,
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            PromptError::Row { .. } => "Each line must be a JSON object with a text as `prompt`.".into(),
            _ => "Give --prompt TEXT, once or several times, or --prompts FILE with one JSON object with a `prompt` \
                  per line."
                .into(),
        })
    }
}

pub(crate) fn open(model: &Model, slots: usize) -> Result<Generator, Failure> {
    let spec = GeneratorSpec {
        storage: model.dtype.map(DType::from),
        machine: Machine {
            device: gpu::choose(model.device.into())?,
            num_threads: model.threads.unwrap_or_else(available_threads),
        },
        slots,
        capacity: model.context,
        score_tokens: 0,
    };
    Generator::open(&hub::model(&model.model)?, model.adapter.as_deref(), &spec).map_err(boxed)
}

fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The sampling parameters: the flags, and the model's defaults for the others.
pub(crate) fn sampling(defaults: SamplingParams, flags: &SamplingFlags) -> SamplingParams {
    let sampled = flags.top_k.is_some() || flags.top_p.is_some() || flags.min_p.is_some();
    let temperature = match flags.temperature {
        Some(temperature) => temperature,
        // `--top-k` and its like only make sense with sampling.
        None if sampled && defaults.temperature == 0.0 => 1.0,
        None => defaults.temperature,
    };
    SamplingParams {
        temperature,
        top_k: flags.top_k.unwrap_or(defaults.top_k),
        top_p: flags.top_p.unwrap_or(defaults.top_p),
        min_p: flags.min_p.unwrap_or(defaults.min_p),
        repetition_penalty: flags.repetition_penalty.unwrap_or(defaults.repetition_penalty),
        seed: flags.seed,
    }
}

pub(crate) fn run(args: &Generate) -> Result<(), Failure> {
    let prompts = prompts(args)?;
    let texts: Vec<&String> =
        prompts.iter().flat_map(|p| std::iter::repeat_n(p, args.samples.max(1))).collect();
    let mut generator = open(&args.model, args.slots.min(texts.len()))?;
    let params = sampling(generator.default_sampling(), &args.sampling);
    let tokenizer = generator.tokenizer();
    let ids = texts
        .iter()
        .map(|text| tokenizer.encode(text))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| -> Failure { Box::new(e) })?;
    if texts.len() == 1 && !args.json {
        return stream(&mut generator, texts[0], &ids[0], args, params);
    }
    let mut decoders: Vec<Decoder> = texts.iter().map(|_| Decoder::new(&args.sampling.stop)).collect();
    let start = std::time::Instant::now();
    let completions = {
        // Without stop strings, the text is decoded once, at the end.
        let decodes = !args.sampling.stop.is_empty();
        let mut listener =
            |sampled: SampledToken| !decodes || decoders[sampled.prompt].push(&tokenizer, sampled.token).1;
        generator.generate(&ids, args.sampling.max_new_tokens, params, &mut listener).map_err(boxed)?
    };
    let seconds = start.elapsed().as_secs_f64();
    for ((text, completion), decoder) in texts.iter().zip(&completions).zip(&mut decoders) {
        if args.sampling.stop.is_empty() {
            completion.tokens.iter().for_each(|token| {
                decoder.push(&tokenizer, *token);
            });
        }
        let reply = decoder.whole(&tokenizer);
        let line = if args.json {
            row(text, &reply, completion).to_string()
        } else {
            format!("{text}{reply}\n{}", "-".repeat(20))
        };
        report::print(&(line + "\n"))?;
    }
    let tokens: usize = completions.iter().map(|c| c.log_probs.len()).sum();
    report::print_aside(&format!(
        "{tokens} tokens in {seconds:.2} s, {:.0} tokens/s",
        tokens as f64 / seconds
    ));
    Ok(())
}

/// Prints the text of one prompt while it is generated.
fn stream(
    generator: &mut Generator,
    prompt: &str,
    ids: &[u32],
    args: &Generate,
    params: SamplingParams,
) -> Result<(), Failure> {
    let tokenizer = generator.tokenizer();
    report::print(prompt)?;
    let mut decoder = Decoder::new(&args.sampling.stop);
    let start = std::time::Instant::now();
    let mut failed = None;
    let prompts = [ids.to_vec()];
    let completions = {
        let mut listener = |sampled: SampledToken| {
            let (text, continues) = decoder.push(&tokenizer, sampled.token);
            failed = failed.take().or(report::print(&text).err());
            continues && failed.is_none()
        };
        generator.generate(&prompts, args.sampling.max_new_tokens, params, &mut listener).map_err(boxed)?
    };
    if let Some(failure) = failed {
        return Err(failure);
    }
    report::print(&(decoder.rest(&tokenizer) + "\n"))?;
    let (tokens, seconds) = (completions[0].log_probs.len(), start.elapsed().as_secs_f64());
    if std::io::stderr().is_terminal() {
        report::print_aside(&format!("{tokens} tokens, {:.0} tokens/s", tokens as f64 / seconds));
    }
    Ok(())
}

/// Decodes the tokens of a completion to text, up to a stop string.
pub(crate) struct Decoder {
    text: TextStream,
    stops: StopStrings,
    so_far: String,
}

impl Decoder {
    pub(crate) fn new(stops: &[String]) -> Decoder {
        Decoder {
            text: TextStream::default(),
            stops: StopStrings::new(stops.to_vec()),
            so_far: String::new(),
        }
    }

    /// The text that a token adds, and whether the completion continues.
    pub(crate) fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> (String, bool) {
        // An id that the tokenizer does not have has no text.
        let text = self.text.push(tokenizer, token).unwrap_or_default();
        let (shown, stopped) = self.stops.push(&text);
        self.so_far.push_str(&shown);
        (shown, !stopped)
    }

    /// The text that was held back, at the end of the completion.
    pub(crate) fn rest(&mut self, tokenizer: &Tokenizer) -> String {
        let (text, _) = self.stops.push(&self.text.finish(tokenizer).unwrap_or_default());
        text + &self.stops.finish()
    }

    fn whole(&mut self, tokenizer: &Tokenizer) -> String {
        let rest = self.rest(tokenizer);
        std::mem::take(&mut self.so_far) + &rest
    }
}

fn row(prompt: &str, reply: &str, completion: &Completion) -> Value {
    json!({
        "prompt": prompt,
        "completion": reply,
        "tokens": completion.tokens,
        "log_probs": completion.log_probs,
        "end": match completion.end {
            FinishReason::EndToken => "end_token",
            FinishReason::Length => "length",
            FinishReason::Stopped => "stop_string",
        },
    })
}

fn prompts(args: &Generate) -> Result<Vec<String>, Failure> {
    let mut all = args.prompt.clone();
    if let Some(path) = &args.prompts {
        let text = read_prompts(path)
            .map_err(|cause| -> Failure { Box::new(PromptError::File { path: path.clone(), cause }) })?;
        for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let bad = |why: String| -> Failure {
                Box::new(PromptError::Row { path: path.clone(), row: i + 1, why })
            };
            let value: Value = serde_json::from_str(line).map_err(|e| bad(format!("not valid JSON: {e}")))?;
            match value.get("prompt").and_then(Value::as_str) {
                Some(prompt) => all.push(prompt.into()),
                None => return Err(bad("`prompt` is missing or not a text".into())),
            }
        }
    }
    if all.is_empty() { Err(Box::new(PromptError::None)) } else { Ok(all) }
}

/// Reads all prompts into memory, up to a limit: the file may have no end.
fn read_prompts(path: &Path) -> std::io::Result<String> {
    const MAX_BYTES: u64 = 1 << 30;
    let mut text = String::new();
    std::fs::File::open(path)?.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(std::io::Error::other(format!("it is larger than {}", Bytes(MAX_BYTES))));
    }
    Ok(text)
}
