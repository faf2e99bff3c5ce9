//! A wide two's-complement integer.

/// Limbs of a [`Wide`].
pub(super) const LIMBS: usize = 34;

/// A signed integer of 2176 bits, least significant limb first. In units of 2^-1074 it holds every float64 exactly, with
/// 77 bits to spare above the largest: 2^77 additions of the largest number cannot overflow it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wide(pub(super) [u64; LIMBS]);

impl Wide {
    pub(super) const ZERO: Self = Self([0; LIMBS]);

    /// Adds `value * 2^bit`, or subtracts it. `bit + 128` is at most the width.
    pub(super) fn add_shifted(&mut self, value: u128, bit: usize, negative: bool) {
        let (limb, shift) = (bit / 64, bit % 64);
        let low = value << shift;
        let high = if shift == 0 { 0 } else { value >> (128 - shift) };
        let parts = [low as u64, (low >> 64) as u64, high as u64];
        let mut carry = false;
        for (i, target) in self.0[limb..].iter_mut().enumerate() {
            let part = parts.get(i).copied().unwrap_or(0);
            if i >= parts.len() && !carry {
                break;
            }
            (*target, carry) =
                if negative { target.sub_borrowing(part, carry) } else { target.add_carrying(part, carry) };
        }
    }

    /// Adds another.
    pub(super) fn add(&mut self, other: &Self) {
        let mut carry = false;
        for (target, &part) in self.0.iter_mut().zip(&other.0) {
            (*target, carry) = target.add_carrying(part, carry);
        }
    }

    /// Whether it is below zero.
    pub(super) fn is_negative(&self) -> bool {
        self.0[LIMBS - 1] >> 63 == 1
    }

    /// Its absolute value.
    pub(super) fn magnitude(&self) -> Self {
        if !self.is_negative() {
            return self.clone();
        }
        let mut result = Self(self.0.map(|limb| !limb));
        result.add_shifted(1, 0, false);
        result
    }

    /// Position of the highest bit that is set.
    pub(super) fn highest_bit(&self) -> Option<usize> {
        let limb = self.0.iter().rposition(|&limb| limb != 0)?;
        Some(limb * 64 + 63 - self.0[limb].leading_zeros() as usize)
    }

    /// The 64 bits from position `bit` on.
    pub(super) fn bits_from(&self, bit: usize) -> u64 {
        let (limb, shift) = (bit / 64, bit % 64);
        let at = |i: usize| self.0.get(i).copied().unwrap_or(0);
        if shift == 0 { at(limb) } else { (at(limb) >> shift) | (at(limb + 1) << (64 - shift)) }
    }

    /// Whether any bit below position `bit` is set.
    pub(super) fn any_below(&self, bit: usize) -> bool {
        let (limb, shift) = (bit / 64, bit % 64);
        self.0[..limb].iter().any(|&l| l != 0) || self.0[limb] & ((1 << shift) - 1) != 0
    }
}

/// Additions with carry in and out.
trait Carry: Sized {
    fn add_carrying(self, other: Self, carry: bool) -> (Self, bool);
    fn sub_borrowing(self, other: Self, borrow: bool) -> (Self, bool);
}

impl Carry for u64 {
    fn add_carrying(self, other: Self, carry: bool) -> (Self, bool) {
        let (sum, first) = self.overflowing_add(other);
        let (sum, second) = sum.overflowing_add(Self::from(carry));
        (sum, first | second)
    }

    fn sub_borrowing(self, other: Self, borrow: bool) -> (Self, bool) {
        let (difference, first) = self.overflowing_sub(other);
        let (difference, second) = difference.overflowing_sub(Self::from(borrow));
        (difference, first | second)
    }
}
