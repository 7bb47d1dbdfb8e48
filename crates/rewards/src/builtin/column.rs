//! The column that holds the expected answer.

use serde_json::Value;

use crate::error::RewardError;
use crate::function::Sample;

/// A value of a row as text. `None` if it is null: the row has no answer.
pub(super) fn text_of(
    function: &str,
    sample: &Sample<'_>,
    column: &str,
) -> Result<Option<String>, RewardError> {
    let Some(value) = sample.columns.get(column) else {
        return Err(RewardError::MissingColumn {
            function: function.to_owned(),
            column: column.to_owned(),
            present: sample.columns.keys().cloned().collect(),
        });
    };
    match value {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.trim().to_owned())),
        Value::Number(number) => Ok(Some(number.to_string())),
        Value::Bool(value) => Ok(Some(value.to_string())),
        Value::Array(_) | Value::Object(_) => Err(RewardError::BadColumn {
            function: function.to_owned(),
            column: column.to_owned(),
            found: if value.is_array() { "a list".to_owned() } else { "an object".to_owned() },
            expected: "text, a number or a Boolean",
        }),
    }
}
