export function UploadPage() {
  return <div class="head"><h1>Upload</h1></div>;
}
