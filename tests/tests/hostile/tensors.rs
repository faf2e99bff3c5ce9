//! A safetensors file taken apart and put together again, whole or not.

use serde_json::{Map, Value, json};

/// Header and data of a safetensors file.
pub(super) struct Tensors {
    /// Name to `dtype`, `shape` and `data_offsets`.
    pub(super) header: Map<String, Value>,
    /// Everything after the header.
    pub(super) data: Vec<u8>,
}

impl Tensors {
    /// Takes a whole file apart.
    pub(super) fn parse(bytes: &[u8]) -> Self {
        let length = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
        let header = serde_json::from_slice(&bytes[8..8 + length]).expect("the golden file has a header");
        Self { header, data: bytes[8 + length..].to_vec() }
    }

    /// The bytes of the file.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let header = Value::Object(self.header.clone()).to_string().into_bytes();
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], &header, &self.data].concat()
    }

    /// Gives a tensor another name.
    pub(super) fn rename(&mut self, from: &str, to: &str) {
        let entry = self.header.remove(from).expect("a tensor of the golden file");
        self.header.insert(to.to_owned(), entry);
    }

    /// Adds a tensor of one float32.
    pub(super) fn add(&mut self, name: &str) {
        let start = self.data.len();
        self.data.extend(1.0_f32.to_le_bytes());
        self.header.insert(name.to_owned(), json!({"dtype": "F32", "shape": [1], "data_offsets": [start, start + 4]}));
    }

    /// Sets a field of a tensor's entry.
    pub(super) fn set(&mut self, name: &str, field: &str, value: Value) {
        self.header.get_mut(name).expect("a tensor of the golden file")[field] = value;
    }
}
