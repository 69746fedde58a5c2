// An image, dropped, pasted or chosen, as the tensor that the model declares.
import { useState } from "preact/hooks";
import type { ImageInput } from "../documents";
import { Drop, Field } from "../fields";
import { useKept } from "../loaded";
import { ErrorLine } from "../ui";
import { AskForm } from "./ask_form";
import type { TensorValue } from "./call";
import type { FormProps } from "./kinds";

const SIDE_MAX = 1024;
const SCALES = [["unit", "0 to 1"], ["bytes", "0 to 255"], ["signed", "-1 to 1"], ["imagenet", "ImageNet's mean and deviation"]] as const;
const FITS = [["cut", "is cut to its middle"], ["stretch", "is stretched"]] as const;
const MEAN = [0.485, 0.456, 0.406];
const DEVIATION = [0.229, 0.224, 0.225];

function canvasOf(width: number, height: number): [HTMLCanvasElement, CanvasRenderingContext2D] {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  if (!context) throw new Error("this browser gives no canvas");
  return [canvas, context];
}

/** The image as a data URL that a reload keeps, with sides of at most SIDE_MAX. */
async function picture(file: Blob): Promise<string> {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new Error("This browser cannot read it as an image.");
  });
  const scale = Math.min(1, SIDE_MAX / Math.max(bitmap.width, bitmap.height));
  const [canvas, context] = canvasOf(Math.max(1, Math.round(bitmap.width * scale)), Math.max(1, Math.round(bitmap.height * scale)));
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/png");
}

async function loaded(address: string): Promise<HTMLImageElement> {
  const image = new Image();
  image.src = address;
  await image.decode();
  return image;
}

/** The pixels at the size that the model takes: the middle is cut out, or the image is stretched. */
function pixels(image: HTMLImageElement, spec: ImageInput, fit: string): ImageData {
  const width = spec.width > 0 ? spec.width : image.width;
  const height = spec.height > 0 ? spec.height : image.height;
  const [, context] = canvasOf(width, height);
  const scale = Math.max(width / image.width, height / image.height);
  const [w, h] = fit === "stretch" ? [width, height] : [image.width * scale, image.height * scale];
  context.imageSmoothingQuality = "high";
  context.drawImage(image, (width - w) / 2, (height - h) / 2, w, h);
  return context.getImageData(0, 0, width, height);
}

function scaled(value: number, channel: number, scale: string): number {
  if (scale === "unit") return value / 255;
  if (scale === "signed") return value / 127.5 - 1;
  if (scale === "imagenet") return (value / 255 - (MEAN[channel] ?? 0.449)) / (DEVIATION[channel] ?? 0.226);
  return value;
}

export function tensorOf(data: ImageData, spec: ImageInput, name: string, datatype: string, scale: string): TensorValue {
  const { width, height } = data;
  const { channels } = spec;
  const size = width * height;
  const out = datatype === "UINT8" ? new Uint8Array(channels * size) : new Float32Array(channels * size);
  const first = spec.layout === "channels_first";
  for (let at = 0; at < size; at++) {
    const of = (channel: number) => data.data[4 * at + channel] ?? 0;
    for (let channel = 0; channel < channels; channel++) {
      const value = channels === 1 ? 0.299 * of(0) + 0.587 * of(1) + 0.114 * of(2) : of(channel);
      out[first ? channel * size + at : at * channels + channel] = scaled(value, channel, datatype === "UINT8" ? "bytes" : scale);
    }
  }
  return { name, datatype, shape: first ? [1, channels, height, width] : [1, height, width, channels], data: out };
}

export function ImageForm({ metadata, kept, busy, send }: FormProps) {
  const usage = metadata.parameters?.usage;
  const spec = usage?.image;
  const name = usage?.input ?? metadata.inputs[0]?.name ?? "";
  const datatype = metadata.inputs.find((one) => one.name === name)?.datatype ?? "FP32";
  const [address, keep] = useKept(kept);
  const [scale, setScale] = useKept(`${kept} scale`, "unit");
  const [fit, setFit] = useKept(`${kept} fit`, "cut");
  const [error, setError] = useState<unknown>(null);
  const take = async (file: Blob) => {
    setError(null);
    try {
      keep(await picture(file));
    } catch (failure) {
      setError(failure);
    }
  };
  if (!spec) return null;
  const ask = async () => ({ inputs: [tensorOf(pixels(await loaded(address), spec, fit), spec, name, datatype, scale)] });
  return (
    <AskForm ask={ask} send={send} disabled={busy || !address}>
      <Drop label="Image file" accept="image/*" pasted onFile={(file) => void take(file)}>Drop an image here, paste one, or choose a file.</Drop>
      <ErrorLine error={error} />
      {address && <p><img class="picture" src={address} alt="what will be sent" /></p>}
      {spec.width > 0 && spec.height > 0 && (
        <Field title={`An image of another shape than ${spec.width} × ${spec.height}`} value={fit} options={FITS} onText={setFit} />
      )}
      {datatype !== "UINT8" && <Field title="Values that the model was trained with" value={scale} options={SCALES} onText={setScale} />}
    </AskForm>
  );
}
