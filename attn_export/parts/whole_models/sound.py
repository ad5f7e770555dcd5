"""Sound for Whisper: .wav files, and their log-mel features as the preprocessor's config says."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from attn_export.errors import BundleError, UsageError, one_line
from attn_export.untrusted_files import checked, parse_json, read_bytes, read_text

SOUND = "preprocessor_config.json"
"""The file of a bundle or a checkpoint that says how features are made of sound."""

_WITH_TEXT = "processor_config.json"
"""The file that has these settings as ``feature_extractor``, beside others."""

_WHISPER = "WhisperFeatureExtractor"
_MOST_BYTES = 2**28
"""The largest size of a file of sound or features."""

_MOST_HERTZ = 8000.0
"""The highest frequency of a filter."""

_Size = Annotated[int, Meta(ge=1, le=2**16)]


class SoundConfig(Struct, frozen=True):
    """How log-mel features are made of sound, by the names and defaults of transformers.

    Attributes:
        feature_size: The number of mel filters.
        sampling_rate: In samples a second.
        chunk_length: The time that is heard, in seconds; shorter sound is followed by zeros.
    """

    feature_extractor_type: str = _WHISPER
    feature_size: Annotated[int, Meta(ge=1, le=1024)] = 80
    sampling_rate: _Size = 16000
    hop_length: _Size = 160
    chunk_length: Annotated[int, Meta(ge=1, le=600)] = 30
    n_fft: Annotated[int, Meta(ge=4, le=2**14)] = 400

    @property
    def samples(self) -> int:
        """The number of samples that are heard."""
        return self.chunk_length * self.sampling_rate

    def features(self, samples: np.ndarray) -> np.ndarray:
        """Return the log-mel features of samples `[N]` in −1 … 1, float32 `[mels, frames]`."""
        heard = np.zeros(self.samples)
        heard[: len(samples)] = samples
        padded = np.pad(heard, self.n_fft // 2, mode="reflect")
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.n_fft)[:: self.hop_length]
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self.n_fft) / self.n_fft)
        # As in Whisper, the last window is left out.
        power = np.abs(np.fft.rfft(windows[:-1] * hann)) ** 2  # [frames, frequencies]
        logs = np.log10(np.maximum(self._filters() @ power.T, 1e-10))
        features: np.ndarray = ((np.maximum(logs, logs.max() - 8) + 4) / 4).astype(np.float32)
        return features

    def _filters(self) -> np.ndarray:
        """Return Slaney's triangular filters, each of the same area, `[mels, frequencies]`."""
        last = 15 + 27 * np.log(_MOST_HERTZ / 1000) / np.log(6.4)
        mels = np.linspace(0, last, self.feature_size + 2)
        # Linear up to 1,000 Hz, which is 15 mel.
        hertz = np.where(mels < 15, mels * 200 / 3, 1000 * 6.4 ** ((mels - 15) / 27))
        at = np.linspace(0, self.sampling_rate // 2, self.n_fft // 2 + 1)
        low, middle, high = hertz[:-2, None], hertz[1:-1, None], hertz[2:, None]
        rises, falls = (at - low) / (middle - low), (high - at) / (high - middle)
        filters: np.ndarray = np.maximum(0, np.minimum(rises, falls)) * 2 / (high - low)
        return filters


def read_sound(folder: Path) -> SoundConfig | None:
    """Return how a checkpoint or a bundle makes features of sound; None if it says nothing."""
    path = folder / SOUND
    try:
        if path.is_file():
            values = parse_json(read_text(path))
        else:
            path = folder / _WITH_TEXT
            values = parse_json(read_text(path)) if path.is_file() else {}
            values = values.get("feature_extractor") if isinstance(values, dict) else values
        is_sound = isinstance(values, dict) and values.get("feature_extractor_type") == _WHISPER
        return checked(values, SoundConfig) if is_sound else None
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {one_line(error)}") from error


def features_of(path: Path, config: SoundConfig | None) -> np.ndarray:
    """Return the features of a file, float32 `[mels, frames]`.

    `path`: ``FILE.wav``, or ``FILE.npy`` with features.
    """
    try:
        data = read_bytes(path, _MOST_BYTES)
        if path.suffix == ".npy":
            found = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            features = np.asarray(found, np.float32)
            if not np.isfinite(features).all():
                raise UsageError(f"--sound {path} holds NaN or infinity; give numbers")
            return features[0] if len(features) == 1 and features.ndim == 3 else features
    except OSError as error:
        raise UsageError(f"--sound {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, MemoryError) as error:
        raise UsageError(f"--sound {path} holds no features: {one_line(error)}") from error
    if path.suffix != ".wav":
        raise UsageError(f"--sound is FILE.wav or FILE.npy; got {path}")
    if config is None:
        raise UsageError(f"the bundle has no {SOUND} of a {_WHISPER}; give features as FILE.npy")
    samples, rate = _samples(path, data)
    if rate != config.sampling_rate:
        raise UsageError(f"--sound {path} has {rate} Hz; give {config.sampling_rate} Hz")
    if len(samples) > config.samples:
        raise UsageError(
            f"--sound {path} lasts {len(samples) / rate:.1f} s, and the model hears "
            f"{config.chunk_length} s; cut it"
        )
    return config.features(samples)


def _samples(path: Path, data: bytes) -> tuple[np.ndarray, int]:
    """Return the samples of a .wav file in −1 … 1, the mean of its channels, and their rate."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            frames = file.readframes(file.getnframes())
    except (wave.Error, EOFError, ValueError, MemoryError) as error:
        raise UsageError(
            f"--sound {path} is no .wav file of integers: {one_line(error)}"
        ) from error
    kind = {1: "u1", 2: "<i2", 4: "<i4"}.get(width)
    if kind is None or not frames:
        raise UsageError(f"--sound {path} has no samples of 8, 16 or 32 bits; give such")
    samples = np.frombuffer(frames, kind, len(frames) // (width * channels) * channels)
    scaled = samples / 2.0 ** (8 * width - 1) - (width == 1)
    return scaled.reshape(-1, channels).mean(1), rate
