//! One cell of an Arrow column as a JSON value.
//!
//! Fields that are null inside a record are left out: Arrow gives every message of a list all fields that
//! any of them has, and a template asks whether a field is there.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef};
use arrow_schema::DataType;
use serde_json::{Map, Value};

use crate::RowFault;

/// Element `at` of `array`, which belongs to column `column`.
pub(super) fn value(array: &ArrayRef, at: usize, column: &str) -> Result<Value, RowFault> {
    if array.is_null(at) {
        return Ok(Value::Null);
    }
    macro_rules! number {
        ($kind:ty) => {
            Value::from(array.as_primitive::<$kind>().value(at))
        };
    }
    Ok(match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => array.as_boolean().value(at).into(),
        DataType::Utf8 => array.as_string::<i32>().value(at).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(at).into(),
        DataType::Utf8View => array.as_string_view().value(at).into(),
        DataType::Int8 => number!(Int8Type),
        DataType::Int16 => number!(Int16Type),
        DataType::Int32 => number!(Int32Type),
        DataType::Int64 => number!(Int64Type),
        DataType::UInt8 => number!(UInt8Type),
        DataType::UInt16 => number!(UInt16Type),
        DataType::UInt32 => number!(UInt32Type),
        DataType::UInt64 => number!(UInt64Type),
        DataType::Float16 => array.as_primitive::<Float16Type>().value(at).to_f64().into(),
        DataType::Float32 => number!(Float32Type),
        DataType::Float64 => number!(Float64Type),
        DataType::List(_) => list(&array.as_list::<i32>().value(at), column)?,
        DataType::LargeList(_) => list(&array.as_list::<i64>().value(at), column)?,
        DataType::FixedSizeList(..) => list(&array.as_fixed_size_list().value(at), column)?,
        DataType::Struct(fields) => {
            let mut map = Map::new();
            for (field, inner) in fields.iter().zip(array.as_struct().columns()) {
                match value(inner, at, column)? {
                    Value::Null => {}
                    value => drop(map.insert(field.name().clone(), value)),
                }
            }
            Value::Object(map)
        }
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            let key = dictionary.normalized_keys()[at];
            value(dictionary.values(), key, column)?
        }
        other => return Err(RowFault::ArrowType { column: column.into(), found: other.to_string() }),
    })
}

fn list(items: &ArrayRef, column: &str) -> Result<Value, RowFault> {
    (0..items.len()).map(|at| value(items, at, column)).collect::<Result<Vec<_>, _>>().map(Value::Array)
}
