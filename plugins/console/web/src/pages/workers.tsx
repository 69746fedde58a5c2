export function WorkersPage() {
  return <div class="head"><h1>Workers</h1></div>;
}
