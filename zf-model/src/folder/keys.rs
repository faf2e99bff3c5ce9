//! Typed access to the keys of `config.json`, with errors that name file, key and value.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use zf_core::{Error, Result};

/// An object of a JSON file.
#[derive(Debug)]
pub(super) struct Keys<'a> {
    file: PathBuf,
    /// Prefix of the keys in messages (`rope_scaling.`).
    prefix: String,
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    /// The keys of a whole file.
    pub(super) fn new(file: &Path, value: &'a Value) -> Result<Self> {
        let map = value
            .as_object()
            .ok_or_else(|| Error::Input(format!("{}: expected a JSON object, found {value}", file.display())))?;
        Ok(Self { file: file.to_path_buf(), prefix: String::new(), map })
    }

    /// The value of `key`, `None` where it is missing or null.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is there, even if null.
    pub(super) fn has(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// An object below `key`.
    pub(super) fn object(&self, key: &str) -> Result<Option<Keys<'a>>> {
        let prefix = format!("{}{key}.", self.prefix);
        self.typed(key, "an object", |value| {
            Some(Keys { file: self.file.clone(), prefix: prefix.clone(), map: value.as_object()? })
        })
    }

    /// A whole number from 0.
    pub(super) fn size(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number from 0", |value| usize::try_from(value.as_u64()?).ok())
    }

    /// A number.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    /// True or false; `default` where it is missing.
    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.typed(key, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// A string.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    /// `value`, or the error that `key` is missing.
    pub(super) fn required<T>(&self, key: &str, value: Result<Option<T>>) -> Result<T> {
        value?.ok_or_else(|| Error::Input(format!("{}: `{}{key}` is missing", self.file.display(), self.prefix)))
    }

    /// The error that a setting is not supported: what it is, and what would be.
    pub(super) fn unsupported(&self, key: &str, instead: &str) -> Error {
        let found = self.map.get(key).cloned().unwrap_or_default();
        Error::Input(format!(
            "{}: `{}{key}` is {found}, which is not supported; {instead}",
            self.file.display(),
            self.prefix
        ))
    }

    fn typed<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| {
            Error::Input(format!("{}: `{}{key}` is {value}; expected {expected}", self.file.display(), self.prefix))
        })
    }
}
