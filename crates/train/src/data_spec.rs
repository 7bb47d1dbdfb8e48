//! Prepares the training and evaluation data of a configuration.

use std::path::PathBuf;

use lockstep_config::{self as config, AlgorithmName, RunConfig};
use lockstep_data::{
    ChatEncoder, Columns, DataError, DataSpec, DataTask, Dataset, EncodeChat, HubFolders, Named, OnBadRow,
    OnLongRow, Packing, Part, PreferenceLayout, Tokenizer, Truncation, locate,
};

use crate::error::TrainError;

/// Prepares the training data, or finds it in the cache.
pub fn prepare_train(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    chat: Option<&ChatEncoder>,
) -> Result<Dataset, TrainError> {
    run(&train_spec(config)?, tokenizer, chat)
}

/// Prepares the evaluation data, if the configuration has any.
pub fn prepare_eval(
    config: &RunConfig,
    tokenizer: &Tokenizer,
    chat: Option<&ChatEncoder>,
) -> Result<Option<Dataset>, TrainError> {
    eval_spec(config)?.map(|spec| run(&spec, tokenizer, chat)).transpose()
}

fn run(spec: &DataSpec, tokenizer: &Tokenizer, chat: Option<&ChatEncoder>) -> Result<Dataset, TrainError> {
    Ok(lockstep_data::prepare(spec, tokenizer, chat.map(|chat| chat as &dyn EncodeChat))?)
}

pub(crate) fn train_spec(config: &RunConfig) -> Result<DataSpec, TrainError> {
    let data = &config.data;
    let files = match &data.dataset {
        Some(named) => split_files(config, named, &named.train_split)?,
        None => data.train_files.clone(),
    };
    let part = match data.eval_fraction {
        Some(fraction) => Part::Train { fraction, seed: config.batch.data_seed },
        None => Part::All,
    };
    Ok(spec(config, files, part)?)
}

/// The evaluation data: files, a split, or a fraction of the training rows.
pub(crate) fn eval_spec(config: &RunConfig) -> Result<Option<DataSpec>, TrainError> {
    let data = &config.data;
    let (files, part) = match (&data.dataset, data.eval_fraction) {
        _ if !data.eval_files.is_empty() => (data.eval_files.clone(), Part::All),
        (_, Some(fraction)) => {
            (train_spec(config)?.files, Part::Eval { fraction, seed: config.batch.data_seed })
        }
        (Some(named), None) if named.evaluates_test_split => {
            (split_files(config, named, &named.test_split)?, Part::All)
        }
        _ => return Ok(None),
    };
    Ok(Some(spec(config, files, part)?))
}

fn split_files(
    config: &RunConfig,
    named: &config::NamedDataset,
    split: &str,
) -> Result<Vec<PathBuf>, DataError> {
    let folders = HubFolders { hub: config.data.hub.hub.clone(), datasets: config.data.hub.datasets.clone() };
    let (config, revision) = (named.config.as_deref(), named.revision.as_deref());
    locate(Named { name: &named.name, config, split, revision }, &folders)
}

/// What the configured algorithm needs the rows for.
fn task(config: &RunConfig) -> DataTask {
    match (config.algorithm.algorithm(), config.algorithm.sampling()) {
        (AlgorithmName::Dpo, _) => DataTask::Preference(PreferenceLayout::Completion),
        (AlgorithmName::Reward, _) => DataTask::Preference(PreferenceLayout::Sequence),
        (_, Some(sampling)) => DataTask::Prompt { max_prompt_length: sampling.max_prompt_length as usize },
        (_, None) => DataTask::Sft,
    }
}

fn spec(config: &RunConfig, files: Vec<PathBuf>, part: Part) -> Result<DataSpec, DataError> {
    let data = &config.data;
    let columns = data.columns.iter().map(|(known, theirs)| (known.as_str(), theirs.as_str()));
    let cache_dir = data.data_cache_dir.clone().unwrap_or_else(|| config.output.output_dir.join("cache"));
    Ok(DataSpec {
        task: task(config),
        files,
        columns: Columns::new(columns)?,
        part,
        max_length: data.max_length as usize,
        packing: match data.packing {
            config::Packing::None => Packing::None,
            config::Packing::Bfd => Packing::Bfd,
            config::Packing::BfdSplit => Packing::BfdSplit,
            config::Packing::Wrapped => Packing::Wrapped,
        },
        truncation: match data.truncation {
            config::Truncation::KeepStart => Truncation::KeepStart,
            config::Truncation::KeepEnd => Truncation::KeepEnd,
        },
        on_long_row: match data.on_long_row {
            config::OnLongRow::Truncate => OnLongRow::Truncate,
            config::OnLongRow::Drop => OnLongRow::Drop,
            config::OnLongRow::Stop => OnLongRow::Stop,
        },
        completion_only_loss: data.completion_only_loss,
        on_bad_row: match data.on_bad_row {
            config::OnBadRow::Stop => OnBadRow::Stop,
            config::OnBadRow::Skip => OnBadRow::Skip,
        },
        cache_dir,
    })
}
