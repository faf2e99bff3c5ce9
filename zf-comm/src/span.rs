//! A tensor's memory, as a collective sees it.

use std::fmt;
use std::ops::Range;

use tch::{Kind, Tensor};
use zf_sys::storage;

/// The element types that collectives move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DType {
    Float32,
    Float16,
    BFloat16,
    Float64,
    Int64,
    Uint8,
}

impl DType {
    pub(crate) fn of(kind: Kind) -> Option<Self> {
        Some(match kind {
            Kind::Float => Self::Float32,
            Kind::Half => Self::Float16,
            Kind::BFloat16 => Self::BFloat16,
            Kind::Double => Self::Float64,
            Kind::Int64 => Self::Int64,
            Kind::Uint8 => Self::Uint8,
            _ => return None,
        })
    }

    pub(crate) fn bytes(self) -> usize {
        match self {
            Self::Float64 | Self::Int64 => 8,
            Self::Float32 => 4,
            Self::Float16 | Self::BFloat16 => 2,
            Self::Uint8 => 1,
        }
    }

    /// Whether sums of this type may be formed in `output`.
    pub(crate) fn sums_into(self, output: Self) -> bool {
        self == output || (output == Self::Float32 && matches!(self, Self::Float16 | Self::BFloat16))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::BFloat16 => "bfloat16",
            Self::Float64 => "float64",
            Self::Int64 => "int64",
            Self::Uint8 => "uint8",
        })
    }
}

/// A run of elements in memory. Whoever holds one keeps the tensor alive beside it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) data: *mut u8,
    /// In elements.
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

// SAFETY: a span is an address. Those who use it follow the rules of `Collective`: the owner touches the memory neither
// for reading nor for writing while the collective runs, and its parts write disjoint memory.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    /// The memory of a 1-D contiguous CPU tensor of a supported type.
    pub(crate) fn of(tensor: &Tensor) -> Result<Self, String> {
        if !tensor.defined() {
            return Err("an undefined tensor".into());
        }
        let kind = tensor.f_kind().map_err(|error| error.to_string())?;
        let Some(dtype) = DType::of(kind) else {
            return Err(format!(
                "a tensor of {kind:?}; supported are float32, float16, bfloat16, float64, int64 and uint8"
            ));
        };
        if tensor.dim() != 1 {
            return Err(format!("a tensor of shape {:?}; expected a 1-D one", tensor.size()));
        }
        let memory = |data: *const u8, len: usize| Self { data: data.cast_mut(), len, dtype };
        // Checks the device, contiguity and that the storage has not been released.
        let span = match dtype {
            DType::Float32 => storage::slice::<f32>(tensor).map(|s| memory(s.as_ptr().cast(), s.len())),
            DType::Float16 => storage::slice::<half::f16>(tensor).map(|s| memory(s.as_ptr().cast(), s.len())),
            DType::BFloat16 => storage::slice::<half::bf16>(tensor).map(|s| memory(s.as_ptr().cast(), s.len())),
            DType::Float64 => storage::slice::<f64>(tensor).map(|s| memory(s.as_ptr().cast(), s.len())),
            DType::Int64 => storage::slice::<i64>(tensor).map(|s| memory(s.as_ptr().cast(), s.len())),
            DType::Uint8 => storage::slice::<u8>(tensor).map(|s| memory(s.as_ptr().cast(), s.len())),
        };
        span.map_err(|error| format!("a tensor that cannot be sent: {error}"))
    }

    pub(crate) fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// The elements `range` of this span, which lie within it.
    pub(crate) fn part(&self, range: &Range<usize>) -> Self {
        debug_assert!(range.end <= self.len, "a part lies within its span");
        let data = self.data.wrapping_add(range.start * self.dtype.bytes());
        Self { data, len: range.len(), dtype: self.dtype }
    }

    /// Whether both are the very same elements.
    pub(crate) fn same(&self, other: &Self) -> bool {
        self.data == other.data && self.len == other.len && self.dtype == other.dtype
    }

    /// Whether both are the same elements, or have no byte in common.
    pub(crate) fn same_or_apart(&self, other: &Self) -> bool {
        self.same(other) || self.apart(other)
    }

    /// Whether they have no byte in common.
    pub(crate) fn apart(&self, other: &Self) -> bool {
        let (a, b) = (self.data.addr(), other.data.addr());
        self.len == 0 || other.len == 0 || a + self.bytes() <= b || b + other.bytes() <= a
    }

    /// Copies `from` here, if it is not the same memory.
    ///
    /// # Safety
    /// Both have the same length and dtype, live during the call, are the same or disjoint, and no other thread writes
    /// them nor reads `self`.
    pub(crate) unsafe fn copy_from(&self, from: &Self) {
        if self.data != from.data && self.len > 0 {
            // SAFETY: the caller's promises.
            unsafe { std::ptr::copy_nonoverlapping(from.data.cast_const(), self.data, self.bytes()) }
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} elements of {}", self.len, self.dtype)
    }
}
