//! Parquet and Arrow files, read a batch of records at a time. Columns that are not wanted are not decoded.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::{ArrowError, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::basic::Compression;

use super::arrow_value::value;
use super::{Body, RawRow, Record, Rows, Wanted};
use crate::{DataError, RowFault};

/// Records decoded at a time.
const BATCH_ROWS: usize = 256;
/// How an Arrow file begins; a stream, which `datasets` writes, does not.
const FILE_MAGIC: &[u8] = b"ARROW1";

type Batches = Box<dyn Iterator<Item = Result<RecordBatch, ArrowError>> + Send>;

pub(super) struct ArrowRows {
    batches: Batches,
    path: PathBuf,
    names: Arc<[String]>,
    batch: Option<RecordBatch>,
    /// The next record within the batch.
    at: usize,
    row: u64,
    /// The names under which the columns of a batch are returned.
    keys: Vec<String>,
    all: bool,
}

/// The columns to read: their indices in the schema, and the names under which they are returned.
fn select(schema: &Schema, wanted: Wanted<'_>) -> (Vec<usize>, Vec<String>) {
    let fields = schema.fields().iter().enumerate();
    fields.filter_map(|(idx, field)| Some((idx, wanted.name(field.name())?))).unzip()
}

fn names(schema: &Schema) -> Arc<[String]> {
    schema.fields().iter().map(|field| field.name().clone()).collect()
}

pub(super) fn parquet(path: &Path, wanted: Wanted<'_>) -> Result<ArrowRows, DataError> {
    let damaged =
        |e: parquet::errors::ParquetError| DataError::Damaged { path: path.into(), why: e.to_string() };
    let builder = ParquetRecordBatchReaderBuilder::try_new(open(path)?).map_err(damaged)?;
    let names = names(builder.schema());
    let (indices, keys) = select(builder.schema(), wanted);
    let schema = builder.parquet_schema();
    let mask = ProjectionMask::roots(schema, indices.iter().copied());
    for group in builder.metadata().row_groups() {
        for (leaf, column) in group.columns().iter().enumerate() {
            let codec = match column.compression() {
                Compression::LZO => "lzo",
                _ => continue,
            };
            if mask.leaf_included(leaf) {
                return Err(DataError::Codec { path: path.into(), codec });
            }
        }
    }
    let reader = builder.with_projection(mask).with_batch_size(BATCH_ROWS).build().map_err(damaged)?;
    Ok(ArrowRows::new(path, Box::new(reader), names, keys, wanted.all()))
}

pub(super) fn ipc(path: &Path, wanted: Wanted<'_>) -> Result<ArrowRows, DataError> {
    let damaged = |e: ArrowError| DataError::Damaged { path: path.into(), why: e.to_string() };
    let read = |source| DataError::Read { path: path.into(), source };
    let mut file = BufReader::new(open(path)?);
    let mut magic = [0; FILE_MAGIC.len()];
    let is_file = match file.read_exact(&mut magic) {
        Ok(()) => magic == *FILE_MAGIC,
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => false,
        Err(e) => return Err(read(e)),
    };
    file.rewind().map_err(read)?;
    // The file is opened twice, because the schema determines which columns to read.
    if is_file {
        let schema = FileReader::try_new(BufReader::new(open(path)?), None).map_err(damaged)?.schema();
        let (indices, keys) = select(&schema, wanted);
        let reader = FileReader::try_new(file, Some(indices)).map_err(damaged)?;
        Ok(ArrowRows::new(path, Box::new(reader), names(&schema), keys, wanted.all()))
    } else {
        let schema = StreamReader::try_new(BufReader::new(open(path)?), None).map_err(damaged)?.schema();
        let (indices, keys) = select(&schema, wanted);
        let reader = StreamReader::try_new(file, Some(indices)).map_err(damaged)?;
        Ok(ArrowRows::new(path, Box::new(reader), names(&schema), keys, wanted.all()))
    }
}

fn open(path: &Path) -> Result<File, DataError> {
    File::open(path).map_err(|source| DataError::Read { path: path.into(), source })
}

impl ArrowRows {
    fn new(path: &Path, batches: Batches, names: Arc<[String]>, keys: Vec<String>, all: bool) -> Self {
        ArrowRows { batches, path: path.into(), names, batch: None, at: 0, row: 0, keys, all }
    }

    fn record(&self, batch: &RecordBatch) -> Result<Body, RowFault> {
        let mut columns = Record::new();
        for (key, column) in self.keys.iter().zip(batch.columns()) {
            columns.insert(key.clone(), value(column, self.at, key)?);
        }
        Ok(Body::new(columns, &self.names, self.all))
    }
}

impl Rows for ArrowRows {
    fn next(&mut self) -> Result<Option<RawRow>, DataError> {
        while self.batch.as_ref().is_none_or(|batch| self.at >= batch.num_rows()) {
            match self.batches.next() {
                None => return Ok(None),
                Some(Ok(batch)) => (self.batch, self.at) = (Some(batch), 0),
                Some(Err(e)) => {
                    let why = format!("after row {}: {e}", self.row);
                    return Err(DataError::Damaged { path: self.path.clone(), why });
                }
            }
        }
        let Some(batch) = &self.batch else { return Ok(None) };
        let body = self.record(batch);
        self.at += 1;
        self.row += 1;
        Ok(Some(RawRow { row: self.row, body }))
    }
}
